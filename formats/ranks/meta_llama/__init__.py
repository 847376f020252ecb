"""Releases of Meta: what lies beside `consolidated.NN.pth`, and how they are written."""
