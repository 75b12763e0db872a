"""One derived table per file: `build(raw tables) -> table`, pure, never reads or writes a file."""
