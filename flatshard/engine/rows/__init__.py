"""Embeddings by rows: ranks exchange rows instead of gathering the table."""
