"""All mutants, in the order of the table. A name is given once; every category has mutants."""

from tests.proof.mutation import host, kernels, owners, places, prefix, salts, tiers
from tests.proof.mutation.mutant import Mutant

GROUPS = (kernels, owners, places, prefix, tiers, host, salts)
MUTANTS: list[Mutant] = [mutant for group in GROUPS for mutant in group.MUTANTS]
