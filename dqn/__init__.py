"""DQN for Atari that says what it needs, keeps to it, and survives being stopped."""

import os

if "OMP_WAIT_POLICY" not in os.environ:
    # PyTorch's OpenMP threads spin between operators, and on two cores keep the emulators from running. A short spin
    # made the whole loop 12 % faster (docs/performance.md); it must be set before PyTorch loads.
    os.environ.setdefault("GOMP_SPINCOUNT", "4000")
