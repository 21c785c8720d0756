"""MLP speculators: a small recurrent network on the target's last hidden state and the tokens behind it."""
