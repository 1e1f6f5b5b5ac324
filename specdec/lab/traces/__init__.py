"""What traces say: every metric by name, and why a drafter is accepted as often as it is."""
