"""The command line: parse, delegate, print. A file per group of commands; none of them imports torch before it runs.

mhckit doctor                         examine this machine: versions, paths, a self-test, speed; --json
mhckit bench                          measure everything; --quick, --only and --claims measure something else
mhckit bench model                    a whole model of transformers, with and without mhckit
mhckit bench training                 what mHC costs a training step
mhckit bench plot RESULTS             pictures from measurements
mhckit bench report RESULTS           one page from measurements
mhckit bench readme                   the README's table from measurements
mhckit bench committed                what `mhckit doctor` compares with, from measurements
mhckit train                          train a language model; alone, or started by torchrun
mhckit warmup --dim C                 compile kernels ahead, into a folder that can be shipped
mhckit inspect SOURCE                 see inside a trained model; --with compares two, --json prints numbers
mhckit export RUN FILE                a run's weights as safetensors
mhckit compare RUN ...                a picture of some runs
"""

from . import bench, doctor, inspect, training, warmup  # importing one adds its commands
from .root import app, main

__all__ = ["app", "bench", "doctor", "inspect", "main", "training", "warmup"]
