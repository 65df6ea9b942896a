// The prefix cache as folds. A fold is filled when it opens. Nodes without a branch between them share a fold.
const tree = (() => {
  const DEEP = 60,
    NEAR = 20,
    BATCH = 100,
    OPENED = 300,
    SMALL = 200,
    { pages, owner, salts } = data.prefix,
    body = $("#prefix .body");
  const flags = unrun(data.prefix.flags),
    uses = unrun(data.prefix.uses),
    leases = unrun(data.prefix.leases);
  const parent = data.prefix.up.map((up, at) => at - up),
    below = pages.map(() => 0),
    heads = [],
    end = [];
  const inside = pages.map(() => []);
  parent.forEach((up, at) => {
    end.push(pages[at] + (up < 0 ? 0 : end[up]));
    if (up >= 0) inside[up].push(at);
  });
  parent.forEach((up, at) => heads.push(up < 0 || inside[up].length > 1 ? at : heads[up]));
  for (let at = parent.length - 1; at >= 0; at--) if (parent[at] >= 0) below[parent[at]] += below[at] + 1;

  let hits = null,
    salted = null,
    kept = null,
    top = null,
    budget = 0;

  const outer = (at) => (heads[at] === at ? (parent[at] < 0 ? -1 : heads[parent[at]]) : heads[at]);

  function filter(matches, matchedSalts) {
    [hits, salted, kept, top] = [matches, matchedSalts, null, null];
    if (hits) {
      kept = new Set(hits);
      for (const at of hits) for (let up = outer(at); up >= 0 && !kept.has(up); up = outer(up)) kept.add(up);
      const [first] = hits,
        path = [];
      for (let up = first ?? -1; up >= 0; up = outer(up)) path.push(up);
      if (path.length > DEEP) top = path[NEAR];
    }
    draw();
  }

  function draw() {
    budget = hits ? OPENED : 0;
    if (!pages.length) return body.replaceChildren(el("p", { class: "none" }, "No prefix cache, or nothing in it."));
    if (top !== null)
      return body.replaceChildren(
        el(
          "button",
          {
            type: "button",
            onclick: () => {
              top = null;
              draw();
            },
          },
          "back to the roots",
        ),
        el("ul", { class: "tree" }, item(top, 0)),
      );
    const shown = where(salts, ([, roots], at) => !hits || salted.has(at) || roots.some((root) => kept.has(root)));
    const list = el("ul", { class: "tree" });
    batch(list, shown, group);
    body.replaceChildren(shown.length ? list : el("p", { class: "none" }, "No node matches."));
  }

  function group(at) {
    const [salt, roots] = salts[at];
    const nodes = roots.reduce((sum, root) => sum + below[root] + 1, 0);
    const title = salt === null ? "no salt" : ["salt ", name(salt)];
    return el(
      "li",
      {},
      fold(
        [el("span", { class: "span" }, title), el("span", { class: "about" }, counted(nodes, "node"))],
        () => chosen(roots),
        0,
        hits ? true : salts.length < 20,
        hits !== null && salted.has(at),
      ),
    );
  }

  const chosen = (nodes) => (kept && nodes.some((at) => kept.has(at)) ? nodes.filter((at) => kept.has(at)) : nodes);

  // Returns the nodes in the fold of a node: its descendants up to the next branch, and the branches.
  function content(at) {
    const line = [];
    while (inside[at].length === 1) line.push((at = inside[at][0]));
    const branches = chosen(inside[at]);
    return kept && line.some((each) => kept.has(each)) && !branches.some((each) => kept.has(each))
      ? line
      : [...line, ...branches];
  }

  function fold(title, nodes, depth, open, hit) {
    const rows = el("ul", {}),
      details = el("details", {}, el("summary", { class: hit ? "hit" : null }, title), rows);
    let filled = false;
    const unfold = () => {
      if (filled) return;
      filled = true;
      batch(rows, nodes(), (at) => item(at, depth + 1));
    };
    details.addEventListener("toggle", () => details.open && unfold());
    if (open) {
      unfold();
      details.open = true;
    }
    return details;
  }

  function batch(rows, entries, entryOf, from = 0) {
    rows.append(...entries.slice(from, from + BATCH).map((each) => entryOf(each)));
    const left = entries.length - from - BATCH;
    if (left > 0) {
      const more = el(
        "button",
        { type: "button" },
        `show ${Math.min(left, BATCH)} of ${left.toLocaleString("en")} more`,
      );
      const entry = el("li", {}, more);
      more.addEventListener("click", () => {
        entry.remove();
        batch(rows, entries, entryOf, from + BATCH);
      });
      rows.append(entry);
    }
  }

  function item(at, depth) {
    const hit = hits !== null && hits.has(at),
      ghost = flags[at] & 2 ? " ghost" : "",
      alone = heads[at] !== at || !inside[at].length;
    if (alone) return el("li", {}, el("div", { class: `leaf${hit ? " hit" : ""}${ghost}` }, about(at)));
    const title = [...about(at), el("span", { class: "about" }, `${counted(below[at], "node")} below`)];
    if (depth > DEEP)
      return el(
        "li",
        {},
        el(
          "div",
          { class: `leaf${hit ? " hit" : ""}${ghost}` },
          title,
          el(
            "button",
            {
              type: "button",
              onclick: () => {
                top = at;
                draw();
              },
            },
            "show from here",
          ),
        ),
      );
    const open =
      hits === null
        ? depth < 2 && pages.length <= SMALL
        : budget > 0 && kept.has(at) && content(at).some((each) => kept.has(each));
    if (hits && open) budget--;
    const entry = el(
      "li",
      {},
      fold(title, () => content(at), depth, open || at === top, hit),
    );
    if (ghost) $("summary", entry).classList.add("ghost");
    return entry;
  }

  function about(at) {
    const from = (end[at] - pages[at]) * data.page,
      ghost = flags[at] & 2,
      own = owner[at];
    const parts = [
      el("span", { class: "span" }, `${from.toLocaleString("en")}..${(end[at] * data.page).toLocaleString("en")}`),
      own >= 0 ? chip(own, `state of ${Number(data.bytes).toLocaleString("en")} B`) : null,
      el(
        "span",
        { class: "about" },
        [
          ghost ? "no KV" : counted(pages[at], "KV page"),
          counted(Number(uses[at]), "hit"),
          ...(leases[at] ? [counted(leases[at], "lease")] : []),
        ].join(" \u00b7 "),
      ),
    ];
    if (ghost) parts.push(el("span", { class: "tag" }, "ghost"));
    else if (flags[at] & 1) parts.push(el("span", { class: "tag" }, "state evicted"));
    return parts.filter(Boolean);
  }

  return {
    draw,
    filter,
    find: (matches) => new Set(owner.flatMap((own, at) => (own >= 0 && matches(own) ? [at] : []))),
    findSalts: (matches) =>
      new Set(salts.flatMap(([salt], at) => (salt !== null && matches(`salt ${salt}`) ? [at] : []))),
  };
})();
