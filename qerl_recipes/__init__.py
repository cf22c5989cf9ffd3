"""Training side of QeRL: a thin layer over TRL, PEFT, transformers and lighteval."""
