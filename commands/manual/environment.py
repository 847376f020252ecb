"""What is to be known of environment variables, for `ftckpt help environment` and its man page."""

from __future__ import annotations

import textwrap

from ftckpt.commands.cli.environment import NO_ENVIRONMENT

_TEXT = """\
Every flag has an environment variable FTCKPT_<VERB>_<FLAG>: FTCKPT_VERIFY_LEVEL=structure stands
for ftckpt verify --level structure. On/off flags take 1 and 0. A flag on the command line wins.
The variables that were used are listed under "environment" in the JSON answer. Any other name that
begins with FTCKPT_ is refused (2), with the nearest that is known: a misspelt one would silently
skip what it asks for. Excepted are FTCKPT_REPLAY_*, which `ftckpt replay` gives to the processes
that it records, and the names that Kubernetes makes for a Service (FTCKPT_SERVICE_HOST, ...).

These flags have none, because nobody may inherit a decision to delete, to overwrite or to skip a
check:
{never}.

ftckpt also honours
  FTCKPT_CONFIG         the file of settings; else ~/.config/ftckpt/config.toml (ftckpt config)
  NO_COLOR              no colours
  TERM=dumb             no colours and no progress bar
  AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID and the
                        other variables of the AWS configuration, for s3:// paths"""


def environment_text() -> str:
    """Return what is to be known of variables that set flags."""
    flags = ("--" + name.replace("_", "-") for name in sorted(NO_ENVIRONMENT))
    # Broken as the lines around it are.
    never = textwrap.fill(", ".join(flags), 99, break_on_hyphens=False)
    return _TEXT.format(never=never)
