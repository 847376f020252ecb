"""Carrying a plan out: preparing it, checking it again, dropping, purging, undeleting."""
