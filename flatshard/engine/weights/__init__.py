"""Where full weights come from: main weights, codecs, host memory."""
