// Tables of requests, sessions and published snapshots. A long table shows its first rows, and a button for more.
const FIRST = 50;

function list(section, heads, rows, cells, none) {
  const body = $(`#${section} .body`),
    rest = el("button", { type: "button", class: "more" }),
    inside = el("tbody");
  let chosen = null,
    most = FIRST;
  if (rows.length)
    body.append(
      el(
        "div",
        { class: "over" },
        el(
          "table",
          {},
          el(
            "thead",
            {},
            el(
              "tr",
              {},
              heads.map((head) => el("th", { scope: "col" }, head)),
            ),
          ),
          inside,
        ),
      ),
      rest,
    );
  else body.append(el("p", { class: "none" }, none));

  function draw() {
    const wanted = rows.filter((_, at) => chosen === null || chosen.has(at)),
      left = wanted.length - most;
    inside.replaceChildren(
      ...wanted.slice(0, most).map((row) =>
        el(
          "tr",
          {},
          cells(row).map((cell) => el("td", {}, cell)),
        ),
      ),
    );
    if (!wanted.length) inside.append(el("tr", {}, el("td", { class: "none", colspan: heads.length }, "No match.")));
    rest.hidden = left <= 0;
    rest.textContent = `show ${Math.min(left, 500).toLocaleString("en")} of ${left.toLocaleString("en")} more`;
  }

  rest.addEventListener("click", () => {
    most += 500;
    draw();
  });
  draw();
  return {
    filter: (places) => {
      chosen = places;
      most = FIRST;
      draw();
    },
  };
}

// Draws a request's tokens from left to right: confirmed tokens are darker, and each state has a pin.
function track(length, sure, places) {
  const most = Math.max(length, 1, ...places.map((at) => owners.labels[at])),
    share = (count) => `${(96 * Math.max(count, 0)) / most + 2}%`;
  const pins = places.map((at) =>
    svg(
      "circle",
      { class: `pin k${owners.kinds[at]}`, cx: share(owners.labels[at]), cy: 9, r: 6 },
      svg("title", {}, `${owners.names[at]}, ${tokens(owners.labels[at])}`),
    ),
  );
  const bar = (kind, count) => svg("rect", { class: kind, x: "2%", y: 7, height: 4, width: `${(96 * count) / most}%` });
  return svg(
    "svg",
    { class: "track", role: "img", "aria-label": `${tokens(length)}, ${sure} confirmed` },
    bar("base", length),
    bar("sure", Math.min(sure, length)),
    pins,
  );
}

const snapshots = owners.kinds.flatMap((kind, at) => (data.kinds[kind] === "snapshot" ? [at] : []));
const origins = new Map(data.origins);

// Inspections that earlier versions saved have no ages.
const ages = (age, idle) =>
  age === null ? [] : el("div", { class: "hint" }, `age ${seconds(age)}${idle ? `, idle ${seconds(idle)}` : ""}`);

function request([row, id, length, confirmed, finished, unsettled, registers, marks, age, idle]) {
  const state = finished
    ? "finished"
    : unsettled
      ? counted(unsettled, "step not settled", "steps not settled")
      : "running";
  const chips = registers.flatMap((at, part) => (at < 0 ? [] : [chip(at, ["live", "lane 0", "lane 1"][part])]));
  const places = [...marks, ...registers.slice(1), registers[0]].filter((at) => at >= 0);
  return [
    [name(id), el("div", { class: "hint" }, `row ${row}`)],
    [state, ages(age, idle)],
    [tokens(length), el("div", { class: "hint" }, `${confirmed.toLocaleString("en")} confirmed`)],
    [chips, marks.map((at) => chip(at))],
    track(length, confirmed, places),
  ];
}

const session = ([id, row, length, pages, states, age, idle]) => [
  name(id),
  [row ? `row ${row}` : "idle", ages(age, idle)],
  tokens(length),
  counted(pages, "KV page"),
  states.map(([at, label]) => (at < 0 ? tokens(label) : chip(at, "state"))),
];

const lists = {
  requests: list(
    "requests",
    ["request", "state", "length", "slots", "states over the tokens"],
    data.requests,
    request,
    "No request runs.",
  ),
  sessions: list(
    "sessions",
    ["session", "turn", "length", "pages", "states"],
    data.sessions,
    session,
    "No open session.",
  ),
  snapshots: list(
    "snapshots",
    ["snapshot", "state", "from"],
    snapshots,
    (at) => [name(owners.names[at]), chip(at), name(origins.get(at) || "")],
    "No published snapshot.",
  ),
};
