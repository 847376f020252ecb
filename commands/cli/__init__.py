"""What the verbs share: the app, their options, their answers, and how they end."""
