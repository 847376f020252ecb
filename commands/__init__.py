"""One module a verb: parse, call, render.

A verb is a module named after it (`plan sweep`: `plan.sweep`). It shows what an operation of the
core does (`ftckpt.operations`), and holds

- `operation`: the function that the shell and Python call alike. Its parameters, help, examples and
  exit codes stand with it, and `cli.derive` makes the command line of them.
- `render(invocation, report, given)`: prints the report, which is the JSON document already, and
  returns a `Result`. `given` has the values of the parameters.
- `observer(invocation, given)`, where something is to be printed while the operation runs.
- `check(invocation, given)`, where the screen has something to refuse before it begins, or takes
  another value than the one given: then it returns all of them.
- `OPTIONS`: dataclasses of what the screen alone is told, such as `--plot`.

Verbs that are no operations of the core yet, and those about the program itself, hold instead

- `command(invocation, ...)`: parameters as `Annotated[..., option(...)]`; its docstring is the
  help, and the first line is the summary in `verbs.VERBS`. It calls the core, prints through the
  invocation and `render`, and returns a `Result` (None means OK).
- `EXAMPLES`: (command line, what it does) pairs, printed at the end of the help.
- `CODES`: the exit codes that it can end with, each with a sentence ("" takes the general one).
- `OPTIONS`, where verbs share many options: dataclasses whose fields are `Annotated` options, with
  a `TITLE` for the help; `invocation.options(Group)` returns their values.

Rules that `app` relies on:

- `--json`, `--quiet`, `--progress`, `--debug` and the settings of object stores are added to
  every verb; a verb does not declare them. They alone have environment variables.
- A verb never prints JSON. It says `invocation.report(target=..., format=..., anything=...)` as
  soon as it knows, and `app` prints the one document at the end, also after an error or a signal.
- In text mode the verb prints its answer with `invocation.print` and everything else with
  `invocation.say`. Both are silent where they should be under `--json` and `--quiet`.
- Errors are raised, never turned into exit codes here. A verdict that is not an error (verify found
  damage and printed it) is a returned `Result`.
- Types named in the signature of `command` are read at run time: import them at module level.
- Nothing heavy at module level: torch, numpy, fsspec and matplotlib are imported inside functions.
"""
