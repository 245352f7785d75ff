"""The recipe of SEKE: `lexperts train seke`."""
