"""Write Meta's releases: `consolidated.NN.pth`, and `params.json` as the last file.

Ranks are cut as Llama 3's code cuts them: the embedding along the vocabulary (`rules/meta.toml`).
Source: llama3/llama/model.py of Meta.
"""

from __future__ import annotations

from ftckpt.checkpoint import Kind
from ftckpt.errors import UnsupportedError, UsageError
from ftckpt.formats.ranks.division import shard_box
from ftckpt.formats.ranks.splits import PARAMETERS, cut_of
from ftckpt.formats.ranks.tensors import RankSplit
from ftckpt.formats.state.rule_tables import built_in
from ftckpt.formats.torch_files.write_tree import Tensor, save
from ftckpt.transfer.content import Content
from ftckpt.transfer.layout import Layout, LayoutRequest, Literal, OutputFile


def release_layout(content: Content, request: LayoutRequest) -> Layout:
    """Lay out a model under Meta's names for `request.tp` ranks, `params.json` beside them.

    Raises:
        UsageError: data-parallel ranks, of which such a release has none.
        UnsupportedError: a tensor that does not divide evenly, or that no rule has.
    """
    world = request.tp or 1
    if request.dp not in (None, 1):
        raise UsageError(
            "Meta's releases have model-parallel ranks alone: --dp divides nothing",
            hint="--tp N divides them over N files",
        )
    rules = built_in("meta", {"columns": 0})
    trees: list[dict[str, Tensor]] = [{} for _ in range(world)]
    unplaced = list(content.objects)
    for key, wanted in content.tensors.items():
        if wanted.component != "model" or wanted.kind not in (Kind.PARAM, Kind.BUFFER):
            unplaced.append(key)
            continue
        rule = rules.get(wanted.name)
        if rule is None:
            raise UnsupportedError(
                f"nothing says how Meta's code divides {wanted.name}",
                hint="--drop leaves it out",
                kind="unknown-rule",
                tensor=key,
            )
        axis = rule.split.axis
        if axis is not None and wanted.shape[axis] % world:
            raise UnsupportedError(
                f"{wanted.name} of {list(wanted.shape)} does not divide evenly over {world} ranks",
                tensor=key,
            )
        cut = cut_of(RankSplit(wanted.shape, axis)) if axis is not None else None
        for rank, tree in enumerate(trees):
            box = shard_box(wanted.shape, cut, world, rank)
            tree[wanted.name] = Tensor.of(content.part(key, box))
    files = [
        OutputFile(f"consolidated.{rank:02d}.pth", save(tree, folder="consolidated"))
        for rank, tree in enumerate(trees)
    ]
    commit = [OutputFile(PARAMETERS, [Literal(content.beside[PARAMETERS])])]
    return Layout(files=files, commit=commit, unplaced=unplaced)
