"""Embeddings by rows: ranks exchange rows instead of gathering the table.

Connected to the rest of the engine by `ParamGroup(kind=RowGradients)` and `Unit.rows`.
"""
