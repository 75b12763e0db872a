"""WHAT IT SHOWS: tables and graded claims -> figures, page, documents, appendices. Never imports torch."""
