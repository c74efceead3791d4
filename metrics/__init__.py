"""Counters, histograms and the exporter that serves them."""
