"""DQN for Atari that says what it needs, keeps to it, and survives being stopped."""
