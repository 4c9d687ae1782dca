"""Small real trainings with one thing wrong in each, and healthy ones: what the doctor is tried on."""
