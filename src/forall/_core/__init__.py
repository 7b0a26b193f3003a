"""The basis that all other packages share: levels, errors, call sites, snapshots of state."""
