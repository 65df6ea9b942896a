"""Mutants of salts: wherever one is handed on, it is left out, and another tenant's states would be found."""

from tests.proof.mutation.mutant import Mutant

ARGUMENTS, ADMISSION, ENGINE, PROMOTION, SESSIONS = (
    f"memstate/{name}.py" for name in ("checks", "engine/admission", "engine/manager", "tiers/load", "prefix/sessions")
)
TREE, CACHE = (f"memstate/prefix/{name}.py" for name in ("tree", "cache"))
KEYS, DIGESTS, MANAGER, HOST, PROMISES, HANDOVER = (
    f"memstate/tiers/{name}.py"
    for name in ("keys", "digests", "manager", "host/tier", "prefetch/agreed", "handover/handover")
)
DEVICE, BELOW, VALUES = (
    f"tests/{name}.py::test_" for name in ("engine/test_salts", "tiers/test_salts_below", "engine/test_salt_values")
)
TWO, ONE, OTHER = (
    "[a-b]",
    "[a-None]",
    "[None-a]",
)  # both tenants have a salt, the one that has computed, the one that asks

STARTED = [
    Mutant(
        "salt: a request looks under none", "stale byte", ADMISSION,
        "self._cache.match(key, request.salt, known - 1)", "self._cache.match(key, None, known - 1)",
        f"{DEVICE}admission_finds_what_its_own_salt_has{ONE}",
    ),
    Mutant(
        "salt: a turn asks its session under none", "stale byte", ADMISSION,
        "self._sessions.find(start.session, key, request.salt)", "self._sessions.find(start.session, key, None)",
        f"{DEVICE}a_later_turn_of_a_session_goes_on_under_its_own_salt{ONE}",
    ),
    Mutant(
        "salt: a request asks host memory under none", "stale byte", ADMISSION,
        "_loader.find(key, request.salt, match", "_loader.find(key, None, match",
        f"{BELOW}host_memory_gives_what_its_own_salt_has[a-None-through]",
    ),
    Mutant(
        "salt: what has come up is looked for under none", "lost snapshot", ADMISSION,
        "self._cache.match(start.key, start.request.salt, len", "self._cache.match(start.key, None, len",
        f"{BELOW}host_memory_gives_what_its_own_salt_has[a-None-through]",
    ),
    Mutant(
        "salt: the lease of an admission has none", "stale label", ADMISSION,
        "self._cache.hold(start.match, start.request.salt)", "self._cache.hold(start.match, None)",
        f"{DEVICE}what_a_row_leaves_goes_under_its_salt[a-None-release]",
    ),
    Mutant(
        "salt: the lease of a second turn has none", "stale label", ADMISSION,
        "turn.length, start.match, start.request.salt)", "turn.length, start.match, None)",
        f"{DEVICE}what_a_later_turn_leaves_goes_under_its_salt{ONE}",
    ),
    Mutant(
        "salt: a row without tokens comes under none", "stale label", ADMISSION,
        "self._cache.on_miss(row, start.request.salt, start.key)", "self._cache.on_miss(row, None, start.key)",
        f"{DEVICE}a_row_without_tokens_leaves_what_it_has_under_its_salt{ONE}",
    ),
    Mutant(
        "salt: a turn begins under none", "stale byte", ADMISSION,
        "row, start.turn, length, start.key, start.request.salt)", "row, start.turn, length, start.key, None)",
        f"{DEVICE}a_later_turn_of_a_session_goes_on_under_its_own_salt{ONE}",
    ),
    Mutant(
        "salt: a session forgets it", "stale byte", SESSIONS,
        "key[: start * BYTES], salt\n", "key[: start * BYTES], None\n",
        f"{DEVICE}a_later_turn_of_a_session_goes_on_under_its_own_salt{ONE}",
    ),
    Mutant(
        "salt: a session keeps that of its first turn", "stale byte", SESSIONS,
        "key[: start * BYTES], salt\n", "key[: start * BYTES], session.salt if session.tokens else salt\n",
        f"{DEVICE}a_later_turn_of_a_session_goes_on_under_its_own_salt{TWO}",
    ),
    Mutant(
        "salt: a turn goes on wherever its tokens do", "stale byte", SESSIONS,
        "if salt != session.salt:\n            return", "if salt is session:\n            return",
        f"{DEVICE}a_turn_after_an_abort_goes_on_under_its_own_salt{TWO}",
    ),
    Mutant(
        "salt: only a session that has one asks for it", "stale byte", SESSIONS,
        "if salt != session.salt:\n            return",
        "if session.salt is not None and salt != session.salt:\n            return",
        f"{DEVICE}an_edited_history_goes_on_under_its_own_salt{OTHER}",
    ),
]  # fmt: skip

ASKED = [
    Mutant(
        "salt: a turn supersedes what another one's left", "lost snapshot", SESSIONS,
        "            session.own.clear()  # nothing", "            pass  # nothing",
        f"{DEVICE}a_turn_supersedes_what_its_own_salt_left{TWO}",
    ),
    Mutant(
        "salt: match looks under none", "stale byte", ENGINE,
        "self._match(encode(tokens), require_salt(salt), session)", "self._match(encode(tokens), None, session)",
        f"{DEVICE}match_finds_what_its_own_salt_has{ONE}",
    ),
    Mutant(
        "salt: match looks into the cache under none", "stale byte", ENGINE,
        "self.prefix.match(key, salt, most)", "self.prefix.match(key, None, most)",
        f"{DEVICE}match_finds_what_its_own_salt_has{ONE}",
    ),
    Mutant(
        "salt: match asks a session under none", "stale byte", ENGINE,
        "self._sessions.find(self._sessions.get(session), key, salt)",
        "self._sessions.find(self._sessions.get(session), key, None)",
        f"{DEVICE}match_finds_what_a_session_keeps_under_its_salt{ONE}",
    ),
    Mutant(
        "salt: match asks host memory under none", "stale byte", ENGINE,
        "self.tiers.find(key, salt, found,", "self.tiers.find(key, None, found,",
        f"{BELOW}match_finds_what_host_memory_has_under_its_salt{ONE}",
    ),
    Mutant(
        "salt: a prefetch counts on what none has", "wrong count", ENGINE,
        "self._match(key, require_salt(salt), session)", "self._match(key, None, session)",
        f"{BELOW}a_prefetch_counts_on_what_its_own_salt_has{ONE}",
    ),
    Mutant(
        "salt: a prefetch asks storage under none", "stale byte", ENGINE,
        "self.tiers.prefetch(key, salt, found,", "self.tiers.prefetch(key, None, found,",
        f"{BELOW}storage_gives_what_its_own_salt_has{ONE}",
    ),
]  # fmt: skip

CACHED = [
    Mutant(
        "salt: the cache looks under none", "stale byte", CACHE,
        "self._unit * self._unit], salt)", "self._unit * self._unit], None)",
        f"{DEVICE}admission_finds_what_its_own_salt_has{ONE}",
    ),
    Mutant(
        "salt: a hit has none", "stale label", CACHE,
        "            self._snapshots.pin(match.snapshot.register)\n        return Lease(node, salt, match, {})",
        "            self._snapshots.pin(match.snapshot.register)\n        return Lease(node, None, match, {})",
        f"{DEVICE}a_row_that_goes_on_from_a_hit_leaves_more_under_its_salt{ONE}",
    ),
    Mutant(
        "salt: a lease that was moved has none", "stale label", CACHE,
        "        self.tree.unlease(lease.node)\n        return Lease(node, salt, match, {})",
        "        self.tree.unlease(lease.node)\n        return Lease(node, None, match, {})",
        f"{DEVICE}what_a_later_turn_leaves_goes_under_its_salt{ONE}",
    ),
    Mutant(
        "salt: who finds nothing has none", "stale label", CACHE,
        "Lease(NO_NODE, salt, NO_MATCH, {}, key=key or b\"\")", "Lease(NO_NODE, None, NO_MATCH, {}, key=key or b\"\")",
        f"{DEVICE}a_row_that_resumes_a_handle_leaves_what_it_has_under_its_salt{ONE}",
    ),
    Mutant(
        "salt: forks have none", "stale label", CACHE,
        "Lease(lease.node, lease.salt, lease.match, {},", "Lease(lease.node, None, lease.match, {},",
        f"{DEVICE}forks_leave_what_they_have_under_the_salt_of_their_row[a-None-fresh]",
    ),
    Mutant(
        "salt: a state of none's counts as there already", "lost snapshot", CACHE,
        "found = self.tree.find(head, lease.salt)", "found = self.tree.find(head, None)",
        f"{DEVICE}a_state_that_another_salt_has_is_no_second_one{OTHER}",
    ),
    Mutant(
        "salt: what a row leaves goes under none", "stale label", CACHE,
        "self.tree.insert(key, insertion.pages, insertion.lease.salt, start)",
        "self.tree.insert(key, insertion.pages, None, start)",
        f"{DEVICE}what_a_row_leaves_goes_under_its_salt[a-None-release]",
    ),
    Mutant(
        "salt: KV that none has is taken for there", "stale byte", CACHE,
        "had = self.tree.find(key, salt).kv", "had = self.tree.find(key, None).kv",
        f"{BELOW}a_state_that_comes_up_shares_no_page_with_another_salt{ONE}",
    ),
    Mutant(
        "salt: what comes up goes under none", "stale label", CACHE,
        "self.tree.insert(key, [0] * had + fresh if fresh else [], salt)",
        "self.tree.insert(key, [0] * had + fresh if fresh else [], None)",
        f"{BELOW}host_memory_gives_what_its_own_salt_has[a-None-through]",
    ),
    Mutant(
        "salt: the tree has one root", "stale byte", TREE,
        "start or self.root(salt)", "start or self.root(next(iter(self.roots), salt))",
        f"{DEVICE}the_tree_has_a_root_for_each_salt{TWO}",
    ),
    Mutant(
        "salt: what is unknown is looked for under the first", "stale byte", TREE,
        "root = self.roots.get(salt)", "root = self.roots.get(salt) or next(iter(self.roots.values()), None)",
        f"{DEVICE}what_is_remembered_of_a_prompt_is_remembered_under_its_salt{TWO}",
    ),
    Mutant(
        "salt: a root does not know its own", "stale label", TREE,
        "self._salts[root] = salt", "self._salts[root] = None",
        f"{DEVICE}the_tree_has_a_root_for_each_salt{ONE}",
    ),
]  # fmt: skip

BELOW_THE_DEVICE = [
    Mutant(
        "salt: a hit is looked for under none", "stale byte", PROMOTION,
        "self._tiers.find(key, salt, match, known,", "self._tiers.find(key, None, match, known,",
        f"{BELOW}host_memory_gives_what_its_own_salt_has[a-None-through]",
    ),
    Mutant(
        "salt: a promise is kept to none", "stale byte", PROMOTION,
        "self._tiers.agreed.get(fetch, key, salt, match, known)",
        "self._tiers.agreed.get(fetch, key, None, match, known)",
        f"{BELOW}what_ranks_have_agreed_on_is_for_its_own_salt{ONE}",
    ),
    Mutant(
        "salt: a hit that is brought up has none", "stale label", PROMOTION,
        "return LowerHit(key, salt, match, hit)", "return LowerHit(key, None, match, hit)",
        f"{BELOW}host_memory_gives_what_its_own_salt_has[a-None-through]",
    ),
    Mutant(
        "salt: a hit is planted under none", "stale label", PROMOTION,
        "self._cache.insert_loaded(lower.head, lower.salt, hit.length)",
        "self._cache.insert_loaded(lower.head, None, hit.length)",
        f"{BELOW}host_memory_gives_what_its_own_salt_has[a-None-through]",
    ),
    Mutant(
        "salt: host memory is asked under none", "stale byte", MANAGER,
        "self._unit * self._unit], salt, match, self._unit)", "self._unit * self._unit], None, match, self._unit)",
        f"{BELOW}host_memory_gives_what_its_own_salt_has[a-None-through]",
    ),
    Mutant(
        "salt: a prefetch goes by digests of none", "stale byte", MANAGER,
        "self.host.digests(whole, salt, match)", "self.host.digests(whole, None, match)",
        f"{BELOW}storage_gives_what_its_own_salt_has{ONE}",
    ),
    Mutant(
        "salt: a look goes by digests of none", "stale byte", HOST,
        "digests = self.digests(key, salt, match)", "digests = self.digests(key, None, match)",
        f"{BELOW}dense_records_give_what_their_own_salt_has{ONE}",
    ),
    Mutant(
        "salt: prompts have the digests of none", "stale byte", HOST,
        "self._digests.of_prompt(self.tree, key, salt, match.found)",
        "self._digests.of_prompt(self.tree, key, None, match.found)",
        f"{BELOW}nodes_and_prompts_have_the_digests_of_their_salt{ONE}",
    ),
    Mutant(
        "salt: a promise is looked at under none", "stale byte", PROMISES,
        "digests = self._host.digests(key, salt, match)", "digests = self._host.digests(key, None, match)",
        f"{BELOW}what_ranks_have_agreed_on_is_for_its_own_salt{ONE}",
    ),
    Mutant(
        "salt: a promise is anybody's", "stale byte", PROMISES,
        "if digests[at - 1 : at] != [hit.state.key]:", "if len(digests) < at:",
        f"{BELOW}what_ranks_have_agreed_on_is_for_its_own_salt{TWO}",
    ),
    Mutant(
        "salt: a hand-over writes under none", "stale label", HANDOVER,
        "Prompt(self._own.of(key, salt),", "Prompt(self._own.of(key, None),",
        f"{BELOW}a_hand_over_brings_what_its_own_salt_has{ONE}",
    ),
    Mutant(
        "salt: a hand-over reads under none", "stale byte", HANDOVER,
        "{of: keys.of(key, salt) for", "{of: keys.of(key, None) for",
        f"{BELOW}a_hand_over_brings_what_its_own_salt_has{ONE}",
    ),
    Mutant(
        "salt: nodes go down under none", "stale label", DIGESTS,
        "tree.salt(node), known)", "None, known)",
        f"{BELOW}nodes_and_prompts_have_the_digests_of_their_salt{ONE}",
    ),
    Mutant(
        "salt: digests of prompts leave it out", "stale byte", DIGESTS,
        "self._keys.of(key, salt, known[", "self._keys.of(key, None, known[",
        f"{BELOW}nodes_and_prompts_have_the_digests_of_their_salt{ONE}",
    ),
    Mutant(
        "salt: the first digest leaves it out", "stale label", KEYS,
        "blake2b(self.fingerprint + encode(salt),", "blake2b(self.fingerprint + encode(None),",
        f"{BELOW}digests_are_of_one_salt{TWO}",
    ),
]  # fmt: skip

MEANT = [
    Mutant(
        "salt: True is let in by requests", "stale byte", ADMISSION,
        "        require_salt(request.salt)\n", "", f"{VALUES}what_is_no_salt_is_refused[bool-admit]",
    ),
    Mutant(
        "salt: True is let in by match", "stale byte", ENGINE,
        "encode(tokens), require_salt(salt), session)", "encode(tokens), salt, session)",
        f"{VALUES}what_is_no_salt_is_refused[bool-match]",
    ),
    Mutant(
        "salt: True is let in by prefetch", "stale byte", ENGINE,
        "_match(key, require_salt(salt), session)", "_match(key, salt, session)",
        f"{VALUES}what_is_no_salt_is_refused[bool-prefetch]",
    ),
    Mutant(
        "salt: True is let in by digests", "stale label", KEYS,
        "_encode(require_salt(salt))", "_encode(salt)", f"{VALUES}what_is_no_salt_has_no_digest[bool]",
    ),
    Mutant(
        "salt: True is 1", "stale byte", ARGUMENTS,
        "type(salt) not in PLAIN and not", "not isinstance(salt, tuple(PLAIN)) and not",
        f"{VALUES}what_is_no_salt_is_refused[bool-admit]",
    ),
    Mutant(
        "salt: 1.0 is 1", "stale byte", ARGUMENTS,
        "frozenset((NoneType, str, bytes, int))", "frozenset((NoneType, str, bytes, int, float))",
        f"{VALUES}what_is_no_salt_is_refused[float-admit]",
    ),
    Mutant(
        "salt: True is 1 within a tuple", "stale byte", ARGUMENTS,
        "(type(part) is not tuple and type(part) not in PLAIN)",
        "(type(part) is not tuple and not isinstance(part, tuple(PLAIN)))",
        f"{VALUES}what_is_no_salt_is_refused[within-admit]",
    ),
    Mutant(
        "salt: a named tuple is a tuple", "stale byte", ARGUMENTS,
        "(type(part) is not tuple and type(part) not in PLAIN)",
        "(not isinstance(part, tuple) and type(part) not in PLAIN)",
        f"{VALUES}what_is_no_salt_is_refused[named tuple-admit]",
    ),
    Mutant(
        "salt: nested without an end", "stale label", ARGUMENTS,
        "for _ in range(NESTED + 1):", "for _ in range(99 * NESTED):",
        f"{VALUES}what_is_no_salt_is_refused[too deep-admit]",
    ),
    Mutant(
        "salt: numbers and texts have one encoding", "stale label", KEYS,
        'return _sized(b"s", str.encode(value', 'return _sized(b"y", str.encode(value',
        f"{VALUES}salts_that_look_alike_have_other_digests",
    ),
    Mutant(
        "salt: a tuple is what it holds", "stale label", KEYS,
        'return _sized(b"t", b"".join(map(_encode, value)))', 'return b"".join(map(_encode, value)) or b"t"',
        f"{VALUES}salts_that_look_alike_have_other_digests",
    ),
]  # fmt: skip

MUTANTS = [*STARTED, *ASKED, *CACHED, *BELOW_THE_DEVICE, *MEANT]
