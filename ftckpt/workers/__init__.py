"""Run work in threads or processes within their limits."""
