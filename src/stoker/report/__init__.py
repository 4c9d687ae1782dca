"""Pages that open by double-click: of runs, diagnoses, evaluations and single events. Nothing here needs torch."""
