// One search box. Hits are marked on the map, filter the lists, and open the folds around them.
const search = (() => {
  const box = $("#query"),
    said = $("#hits"),
    faults = $("#faults .list");
  const lower = owners.names.map((each) => each.toLowerCase());
  let order = [],
    turn = -1,
    last = "";

  function drawFaults(chosen) {
    if (!faults) return;
    const wanted = data.faults.filter((_, at) => chosen === null || chosen.has(at));
    faults.replaceChildren(
      ...wanted.slice(0, 100).map((fault) => el("li", {}, fault)),
      ...(wanted.length > 100 ? [el("li", {}, `and ${(wanted.length - 100).toLocaleString("en")} more`)] : []),
      ...(wanted.length ? [] : [el("li", { class: "none" }, "No match.")]),
    );
  }

  function run() {
    const query = box.value.trim().toLowerCase();
    if (query === last) return;
    last = query;
    if (!query) {
      show(null);
      return;
    }
    const exact = query.match(/^(?:(slot|register|row)s? +)?(\d+)$/),
      what = exact && exact[1],
      value = exact ? Number(exact[2]) : -1;
    const inText = (text) => !what && text.toLowerCase().includes(query);
    const owner = (at) =>
      what === "slot"
        ? owners.slots[at] === value
        : what === "register"
          ? owners.registers[at] === value
          : what === "row"
            ? ofRow(at, value)
            : (exact && owners.registers[at] === value) ||
              (exact && owners.slots[at] === value) ||
              lower[at].includes(query);
    const places = new Set(where(owners.names, (_, at) => owner(at)));
    const slots = new Set();
    for (const at of places)
      if (owners.slots[at] >= 1 && owners.slots[at] <= data.capacity) slots.add(owners.slots[at]);
    if (exact && (!what || what === "slot") && value >= 1 && value <= data.capacity) slots.add(value);
    data.kinds.forEach((kind, at) => {
      if (query.length > 2 && kind.includes(query))
        for (let slot = 1; slot <= data.capacity; slot++) if (kindOf[slot] === at) slots.add(slot);
    });
    if (query.length > 2 && GROUP.includes(query)) byId.forEach((slot) => slots.add(slot));
    const rows = (all, test) => new Set(where(all, test));
    const requests = rows(data.requests, ([row, id, , , , , registers, marks]) =>
      what === "row" ? row === value : inText(id) || [...registers, ...marks].some((at) => places.has(at)),
    );
    for (const at of requests)
      if (inText(data.requests[at][1])) for (const mark of data.requests[at][7]) slots.add(owners.slots[mark]);
    show({
      slots,
      requests,
      sessions: rows(data.sessions, ([id, row, , , states]) =>
        what === "row" ? row === value : inText(`session ${id}`) || states.some(([at]) => places.has(at)),
      ),
      snapshots: rows(snapshots, (at) => places.has(at) || inText(origins.get(at) || "")),
      nodes: tree.find((at) => places.has(at)),
      salts: tree.findSalts(inText),
      faults: rows(data.faults, (fault) =>
        exact ? ` ${fault} `.toLowerCase().match(new RegExp(`${what || ""}\\W*\\b${value}\\b`)) : inText(fault),
      ),
      spans: timeline.find((text, register) =>
        exact ? (!what || what === "register") && register === value : inText(text),
      ),
    });
  }

  const ofRow = (at, row) =>
    (data.kinds[owners.kinds[at]] === "live" ||
      data.kinds[owners.kinds[at]] === "lane" ||
      data.kinds[owners.kinds[at]] === "mark") &&
    lower[at].startsWith(`row ${row} `);

  function show(matches) {
    order = matches ? [...matches.slots].sort((a, b) => a - b) : [];
    turn = -1;
    map.mark(matches && matches.slots);
    for (const each of ["requests", "sessions", "snapshots"]) lists[each].filter(matches && matches[each]);
    tree.filter(matches && matches.nodes, matches && matches.salts);
    timeline.filter(matches && matches.spans);
    drawFaults(matches && matches.faults);
    said.textContent = matches ? told(matches) : "";
  }

  function told(matches) {
    const named = {
      slots: "slot",
      requests: "request",
      sessions: "session",
      snapshots: "snapshot",
      nodes: "cached node",
      salts: "salt",
      faults: "fault",
      spans: "span of the timeline",
    };
    const parts = Object.entries(named)
      .filter(([key]) => matches[key].size)
      .map(([key, one]) => counted(matches[key].size, one, key === "spans" ? "spans of the timeline" : undefined));
    const sum = Object.keys(named).reduce((total, key) => total + matches[key].size, 0);
    return sum ? `${counted(sum, "hit")}: ${parts.join(", ")}` : "no hit";
  }

  function ask(text) {
    box.value = text;
    run();
  }

  box.addEventListener("input", () => later(run, 60));
  box.addEventListener("search", run); // the clear button of the box
  box.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      ask("");
      box.blur();
    }
    if (event.key === "Enter") {
      // goes to the next hit
      run();
      if (order.length) map.choose(order[(turn = (turn + 1) % order.length)]);
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && event.target !== box && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      box.focus();
      box.select();
    } else if (event.key === "Escape") ask("");
  });
  return { ask, start: () => drawFaults(null) };
})();
