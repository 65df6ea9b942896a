// The map of all slots: one canvas, with a cell for each slot.
const map = (() => {
  const canvas = $("#slots canvas"),
    frame = $("#slots .map"),
    cursor = $("#slots .cursor"),
    detail = $("#slots .detail");
  const RINGS = 200,
    shown = data.kinds.map(() => true);
  let hits = null,
    slot = 1,
    form = null;

  function shape() {
    // the more slots, the smaller the cells
    const width = Math.max(200, frame.parentElement.clientWidth - 2),
      n = data.capacity;
    const named = data.short.length > 0;
    const [w, h] = named ? [92, 40] : n <= 1000 ? [18, 18] : n <= 10000 ? [10, 10] : n <= 50000 ? [6, 6] : [4, 4];
    const gutter = named ? 0 : 8 + 7 * String(n).length,
      gap = w > 4 ? 1 : 0;
    const columns = Math.max(1, Math.floor((width - gutter) / w));
    const even = columns > 10 && !named ? columns - (columns % 10) : columns;
    const wide = named ? Math.min(160, Math.floor(width / Math.min(n, even))) : w;
    return { w: wide, h, gap, gutter, columns: Math.min(n, even), named };
  }

  function draw() {
    form = shape();
    const { w, h, gap, gutter, columns, named } = form,
      rows = Math.ceil(data.capacity / columns);
    const scale = Math.min(window.devicePixelRatio || 1, 16000 / (rows * h), 16000 / (gutter + columns * w));
    canvas.width = Math.round((gutter + columns * w) * scale);
    canvas.height = Math.round(rows * h * scale);
    canvas.style.width = `${gutter + columns * w}px`;
    canvas.style.height = `${rows * h}px`;
    const pen = canvas.getContext("2d");
    pen.scale(scale, scale);
    const colours = data.kinds.map((_, kind) => colour(`--k${kind}`)),
      soft = colour("--soft"),
      strong = colour("--text"),
      card = colour("--card");
    const inks = data.kinds.map((_, kind) => (kind === FREE ? strong : colour(`--ink${kind}`)));
    for (let row = 0; row < rows; row++) {
      const end = Math.min(data.capacity, (row + 1) * columns);
      for (let first = row * columns + 1; first <= end;) {
        const kind = kindOf[first],
          faint = pale(first);
        let last = first;
        while (!gap && last < end && kindOf[last + 1] === kind && pale(last + 1) === faint) last++;
        const x = gutter + ((first - 1) % columns) * w,
          y = row * h,
          width = (last - first + 1) * w - gap;
        pen.globalAlpha = faint ? 0.15 : 1;
        pen.fillStyle = colours[kind];
        pen.fillRect(x, y, width, h - gap);
        if (BAD[kind] && w >= 10 && !named && !faint) cross(pen, x, y, Math.min(width, h) - gap, card);
        if (hits && !faint && w >= 6) {
          pen.strokeStyle = strong;
          pen.strokeRect(x + 0.5, y + 0.5, width - 1, h - gap - 1);
        }
        if (named) label(pen, first, x, y, w, faint ? strong : inks[kind], faint);
        first = last + 1;
      }
      if (!named && (row * h) % Math.max(h, 18) < h) {
        pen.globalAlpha = 1;
        pen.fillStyle = soft;
        pen.font = "11px system-ui, sans-serif";
        pen.textAlign = "right";
        pen.textBaseline = "middle";
        pen.fillText(row * columns + 1, gutter - 6, row * h + Math.max(h / 2, 6));
      }
    }
    if (hits && hits.size <= RINGS && w < 10) for (const at of hits) ring(pen, at, strong);
    place();
  }

  function ring(pen, at, strong) {
    // marks a hit whose cell is too small to see
    const { w, h, gutter, columns } = form;
    pen.globalAlpha = 1;
    pen.strokeStyle = strong;
    pen.lineWidth = 1.5;
    pen.beginPath();
    pen.arc(gutter + (((at - 1) % columns) + 0.5) * w, (Math.floor((at - 1) / columns) + 0.5) * h, 8, 0, 2 * Math.PI);
    pen.stroke();
  }

  function mark(slots) {
    // marks the hits of a search, and scrolls to the first
    hits = slots;
    draw();
    if (!hits || !hits.size) return;
    const first = Math.min(...[...hits].slice(0, 1000)),
      box = frame.parentElement;
    box.scrollTop = Math.floor((first - 1) / form.columns) * form.h - box.clientHeight / 2;
  }

  const pale = (at) => !shown[kindOf[at]] || (hits !== null && !hits.has(at));

  function cross(pen, x, y, size, card) {
    // marks a bad slot, also for readers who see no colours
    pen.strokeStyle = card;
    pen.lineWidth = 1.5;
    pen.beginPath();
    for (const [a, b] of [
      [0, 1],
      [1, 0],
    ]) {
      pen.moveTo(x + size * (0.25 + a / 2), y + size * 0.25);
      pen.lineTo(x + size * (0.25 + b / 2), y + size * 0.75);
    }
    pen.stroke();
    pen.lineWidth = 1;
  }

  function label(pen, at, x, y, w, ink, faint) {
    pen.globalAlpha = faint ? 0.4 : 1;
    pen.fillStyle = ink;
    pen.textAlign = "right";
    pen.textBaseline = "top";
    pen.font = "10px system-ui, sans-serif";
    pen.fillText(at, x + w - 6, y + 4);
    pen.textAlign = "left";
    pen.font = "600 11px system-ui, sans-serif";
    const text = BAD[kindOf[at]] ? data.kinds[kindOf[at]] : data.short[at - 1];
    pen.fillText(cut(pen, text, w - 12), x + 6, y + 21);
  }

  function cut(pen, text, width) {
    // keeps the end of a name that does not fit, because names differ in their ends
    let from = 0;
    while (from < text.length && pen.measureText((from ? "\u2026" : "") + text.slice(from)).width > width) from++;
    return (from ? "\u2026" : "") + text.slice(from);
  }

  function place() {
    const { w, h, gap, gutter, columns } = form,
      at = slot - 1;
    cursor.style.left = `${gutter + (at % columns) * w - 1}px`;
    cursor.style.top = `${Math.floor(at / columns) * h - 1}px`;
    cursor.style.width = `${Math.max(w - gap, 3) + 2}px`;
    cursor.style.height = `${Math.max(h - gap, 3) + 2}px`;
  }

  function describe(at) {
    const mine = ownersOf.get(at) || [],
      kind = data.kinds[kindOf[at]];
    const parts = mine.map(
      (one) => ` ${owners.names[one]}, ${tokens(owners.labels[one])}, register ${owners.registers[one]}`,
    );
    if (byId.has(at)) parts.push(" open claim group");
    return [`slot ${at}`, ` ${kind}${parts.length ? ":" : ""}`, parts.join(" and")];
  }

  function tell(at) {
    const [number, kind, rest] = describe(at);
    detail.replaceChildren(swatch(kindOf[at]), " ", el("b", {}, number), kind, name(rest));
  }

  function choose(at, show = false) {
    slot = Math.min(data.capacity, Math.max(1, at));
    cursor.hidden = false;
    place();
    tell(slot);
    canvas.setAttribute("aria-valuenow", slot);
    canvas.setAttribute("aria-valuetext", describe(slot).join(""));
    cursor.scrollIntoView({ block: "nearest" });
    if (show) canvas.focus();
  }

  function under(event) {
    const box = canvas.getBoundingClientRect(),
      { w, h, gutter, columns } = form;
    const column = Math.floor((event.clientX - box.left - gutter) / w),
      at = Math.floor((event.clientY - box.top) / h) * columns + column + 1;
    return column >= 0 && column < columns && at >= 1 && at <= data.capacity ? at : 0;
  }

  canvas.addEventListener("mousemove", (event) => under(event) && tell(under(event)));
  canvas.addEventListener("mouseleave", () => (cursor.hidden ? detail.replaceChildren() : tell(slot)));
  canvas.addEventListener("click", (event) => under(event) && choose(under(event), true));
  canvas.addEventListener("focus", () => choose(slot));
  canvas.addEventListener("keydown", (event) => {
    const to = {
      ArrowLeft: slot - 1,
      ArrowRight: slot + 1,
      ArrowUp: slot - form.columns,
      ArrowDown: slot + form.columns,
      Home: 1,
      End: data.capacity,
    }[event.key];
    if (event.key === "Enter" && ownerNames(slot).length) search.ask(ownerNames(slot)[0]);
    else if (to !== undefined && (event.key.length < 8 || (to >= 1 && to <= data.capacity))) choose(to);
    else if (to === undefined) return;
    event.preventDefault();
  });
  canvas.setAttribute("aria-valuemax", data.capacity);

  function legend() {
    const counts = data.kinds.map(() => 0);
    for (let at = 1; at <= data.capacity; at++) counts[kindOf[at]]++;
    const buttons = data.kinds.map(
      (kind, at) =>
        counts[at] > 0 &&
        el(
          "button",
          {
            type: "button",
            "aria-pressed": "true",
            "data-kind": kind,
            onclick: (event) => toggle(at, event.currentTarget),
          },
          swatch(at),
          `${kind} ${counts[at].toLocaleString("en")}`,
        ),
    );
    $("#slots .legend").append(...buttons.filter(Boolean));
  }

  function toggle(kind, button) {
    shown[kind] = !shown[kind];
    button.setAttribute("aria-pressed", shown[kind]);
    draw();
    timeline.draw();
  }

  function bad() {
    // lists leaked and contested slots
    const slots = [];
    for (let at = 1; at <= data.capacity; at++) if (BAD[kindOf[at]]) slots.push(at);
    const buttons = slots
      .slice(0, 60)
      .map((at) =>
        el("button", { type: "button", onclick: () => choose(at, true) }, `${data.kinds[kindOf[at]]}: slot ${at}`),
      );
    $("#slots .named").append(
      ...buttons,
      ...(slots.length > 60 ? [`and ${(slots.length - 60).toLocaleString("en")} more`] : []),
    );
  }

  function start() {
    legend();
    bad();
    draw();
    new ResizeObserver(() => later(draw, 50)).observe(frame.parentElement);
  }

  return { start, draw, choose, shown, mark };
})();
