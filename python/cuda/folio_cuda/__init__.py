"""libfolio_cuda.so, the CUDA backend of the package folio. folio.Context("cuda") finds it here."""

from pathlib import Path

LIBRARY = str(Path(__file__).with_name("libfolio_cuda.so"))
