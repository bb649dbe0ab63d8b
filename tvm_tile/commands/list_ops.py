"""``tvm-tile list``: the kernel library."""

from __future__ import annotations

from .common import emit, find_op


def add_parser(subparsers) -> None:
    """Declare the command."""
    parser = subparsers.add_parser("list", help="list the ops, or one op's shape parameters and dtypes")
    parser.add_argument("op", nargs="?", metavar="OP")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def _document(spec) -> dict:
    params = {
        key: {"type": kind.__name__, "default": default, "help": text}
        for key, (kind, default, text) in spec.shape_params.items()
    }
    return {"name": spec.name, "doc": spec.doc, "dtypes": list(spec.dtypes), "shape": params}


def execute(arguments) -> int:
    """Print the ops."""
    from ..ops import registry

    if arguments.op:
        document = _document(find_op(arguments.op))
        lines = [document["name"], f"  {document['doc']}", f"  dtypes: {', '.join(document['dtypes'])}", "  --shape"]
        width = max((len(k) for k in document["shape"]), default=0)
        for key, facts in document["shape"].items():
            lines.append(f"    {key:<{width}}  {facts['help']} ({facts['type']}, default {facts['default']})")
        emit(arguments, document, lines)
        return 0
    specs = [registry.get(name) for name in registry.names()]
    width = max((len(s.name) for s in specs), default=0)
    lines = [f"{s.name:<{width}}  {s.doc.strip().splitlines()[0]}" for s in specs]
    emit(arguments, {"ops": [_document(s) for s in specs]}, lines)
    return 0
