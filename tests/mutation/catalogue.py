"""All mutants, in the order of the table. A name is given once; every category has mutants."""

from tests.mutation import kernels, owners, places, prefix
from tests.mutation.mutant import Mutant

MUTANTS: list[Mutant] = [*kernels.MUTANTS, *owners.MUTANTS, *places.MUTANTS, *prefix.MUTANTS]
