"""The course's tasks, the worlds they run in, and the marks: what zmpi.grade is made of."""
