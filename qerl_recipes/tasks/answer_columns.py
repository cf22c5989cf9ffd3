"""Check that the data hold the answers that a built-in reward compares with completions.

Every row needs one, as it was written.
"""

from collections.abc import Iterator

from datasets import Dataset

# Types that a value may have. A float keeps its value, but not how it was written (3.0 or 3, 1e3 or 1000).
LINE = '{"prompt": "1+2=", "answer": "3"}'
LETTERS, VALUES = (str, int), (str, int, float)
COMPARED = {
    "exact_answer": ("answer", LETTERS),
    "running_sum_correct": ("answer", LETTERS),
    "last_number": ("answer", VALUES),
    **dict.fromkeys(("accuracy", "cosine", "dapo_score", "length"), ("solution", VALUES)),
}


def misfits(reward: str, rows: Dataset, split: str) -> Iterator[str]:
    """Yield one line for each reason why the built-in ``reward`` cannot compare with the column it reads.

    Other rewards are not checked, nor is a missing column. ``split`` is the name of the ``rows`` in the message.
    """
    column, kinds = COMPARED.get(reward, ("", ()))
    if column not in rows.column_names:
        return
    values = rows[column][:]
    if wrong := sorted({type(value).__name__ for value in values if value is not None and type(value) not in kinds}):
        yield (
            f"reward {reward} compares completions with the column {column}, which holds {', '.join(wrong)} in the "
            f"{split} data; write each as a text in quotes ({LINE}). A text that looks like a date is read as one from "
            "JSON; Parquet keeps it"
        )
    empty = [i for i, value in enumerate(values) if value is None or not str(value).strip()]
    if empty:
        yield (
            f"reward {reward} compares completions with the column {column}, which is empty in {len(empty)} of the "
            f"{len(values)} rows of the {split} data, the first of them row {empty[0] + 1}: no completion could be "
            "right there; leave these problems out"
        )
