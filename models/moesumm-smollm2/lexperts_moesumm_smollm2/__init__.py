"""The default summariser of lexperts, without its backbone: `run_tools.packaged.find_packaged("moesumm-smollm2")` is the whole."""
