"""Imported first by every process of the tests: at the default rate, collecting garbage takes up to a tenth of them."""

import gc

gc.set_threshold(50_000)
