"""`docstrings`: Python source as triples, a record for each function that is documented.

    query     the first paragraph of its documentation
    positive  its code without that, as `ast.unparse` writes it
    group     the file: functions of one are in one split

The source is parsed, and never run.
"""

import ast
from collections.abc import Iterator

from pretrain.config.prepare import InputConfig
from pretrain.preparation.filters import BAD_FIELD, BadInputError, Document
from pretrain.preparation.input_parts import Slice
from pretrain.preparation.inputs.opening import InputStream
from pretrain.preparation.readers.lines import read_text
from pretrain.preparation.readers.records import ReadRule

MIN_WORDS = 3
"""Words of documentation from which on it describes a function."""


def read_docstrings(stream: InputStream, piece: Slice, rule: ReadRule) -> Iterator[Document]:
    """Yields the records of a file. Memory: the file, of at most the limit, and its tree."""
    for source in read_text(stream, piece, rule):
        if source.refused is not None:
            yield source
            continue
        consumed_bytes = source.consumed_bytes
        try:
            tree = ast.parse(source.text)
        except (SyntaxError, ValueError, RecursionError) as error:
            fix = "correct it, or leave such files out (--on-error skip, or on_error of the input)"
            text = f"not Python: {error}"
            bad = BadInputError(text, where=stream.file.shown, fix=fix, reason=BAD_FIELD)
            yield rule.leave_out(bad, consumed_bytes)
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            record = _record(node, rule.config)
            if record is not None:
                record[rule.config.group_field] = stream.file.shown
                yield rule.build(record, consumed_bytes)
                consumed_bytes = 0
        if consumed_bytes:  # of a file without functions
            yield Document("", b"", consumed_bytes)


_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _record(node: _Function, config: InputConfig) -> dict[str, str] | None:
    """Returns the record of a function; None where it has no documentation, or nothing else."""
    query = (ast.get_docstring(node) or "").split("\n\n")[0]
    if len(query.split()) < MIN_WORDS or len(node.body) < 2:
        return None
    node.body = node.body[1:]
    return {config.query_field: query, config.positive_field: ast.unparse(node)}
