"""Embeddings by rows: what is exchanged instead of the table.

Meets the rest at `ParamGroup(kind=RowGradients)` and `Unit.rows`.
"""
