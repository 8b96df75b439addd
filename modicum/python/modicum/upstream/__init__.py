"""Private names of other packages that Modicum uses, with checks of their behaviour."""
