// Local times, copy buttons, refreshing and the live tail. All pages except the live tail work without this script.
"use strict";
(() => {
  const two = (number) => String(number).padStart(2, "0");

  function local(moment) {
    const day = `${moment.getFullYear()}-${two(moment.getMonth() + 1)}-${two(moment.getDate())}`;
    const ms = String(moment.getMilliseconds()).padStart(3, "0");
    return `${day} ${two(moment.getHours())}:${two(moment.getMinutes())}:${two(moment.getSeconds())}.${ms}`;
  }

  function showLocalTimes(root) {
    for (const element of root.querySelectorAll("time[datetime]")) {
      const moment = new Date(element.dateTime);
      if (!Number.isNaN(moment.getTime())) element.textContent = local(moment);
    }
  }

  // A time typed without a zone is in the reader's zone, not in that of the server.
  function localizeTypedTime(form) {
    form.addEventListener("submit", () => {
      const field = form.querySelector("input[data-time]");
      if (field && /^\s*\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)?)?\s*$/.test(field.value)) {
        const text = field.value.trim().replace(" ", "T");
        const moment = new Date(text.length === 10 ? `${text}T00:00` : text);
        if (!Number.isNaN(moment.getTime())) field.value = moment.toISOString();
      }
    });
  }

  function addCopyButtons(root) {
    for (const button of root.querySelectorAll("button.copy")) {
      if (!navigator.clipboard) continue; // browsers offer it on secure pages only
      button.hidden = false;
      button.addEventListener("click", async () => {
        const from = button.dataset.copyFrom && document.getElementById(button.dataset.copyFrom);
        const before = button.textContent;
        try {
          await navigator.clipboard.writeText(from ? from.textContent : button.dataset.copy);
          button.textContent = "Copied";
        } catch {
          button.textContent = "Could not copy";
        }
        setTimeout(() => { button.textContent = before; }, 1500);
      });
    }
  }

  // Only boxes that scroll take the keyboard focus.
  function markScrollable(root) {
    for (const box of root.querySelectorAll(".scroll")) {
      const scrolls = box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight;
      if (scrolls) box.tabIndex = 0;
      else if (box !== document.activeElement) box.removeAttribute("tabindex");
    }
  }

  // ------------------------------------------------------------ refreshing what is shown

  async function refresh() {
    const live = document.querySelector("[data-live]");
    if (!live || document.hidden) return;
    let text;
    try {
      const answer = await fetch(location.href, { headers: { accept: "text/html" } });
      if (!answer.ok) return;
      text = await answer.text();
    } catch {
      return; // the page shows how old its data are
    }
    const found = new DOMParser().parseFromString(text, "text/html").getElementById(live.id);
    if (!found) return;
    const focused = live.contains(document.activeElement) ? document.activeElement : null;
    const place = focused && [...live.querySelectorAll(focusable)].indexOf(focused);
    const opened = [...live.querySelectorAll("details[open]")].map((one) => one.id);
    const scrolled = [...live.querySelectorAll(".scroll")].map((one) => [one.scrollLeft, one.scrollTop]);
    live.toggleAttribute("data-soon", found.hasAttribute("data-soon"));
    showLocalTimes(found);
    live.replaceChildren(...found.childNodes);
    for (const id of opened) document.getElementById(id)?.setAttribute("open", "");
    live.querySelectorAll(".scroll").forEach((one, at) => {
      if (scrolled[at]) [one.scrollLeft, one.scrollTop] = scrolled[at];
    });
    markScrollable(live);
    if (focused) live.querySelectorAll(focusable)[place]?.focus({ preventScroll: true });
  }

  // Rates need a second refresh; with thousands of topics it takes longer.
  function refreshSoon(live, times) {
    if (!times || !live.hasAttribute("data-soon")) return;
    setTimeout(() => refresh().then(() => refreshSoon(live, times - 1)), 1500);
  }

  const focusable = "a[href], button, input, select, summary, [tabindex]";

  function setUpRefresh() {
    const live = document.querySelector("[data-live]");
    const box = document.getElementById("refresh");
    if (!live || !box) return;
    box.closest(".refresh").hidden = false;
    try {
      box.checked = localStorage.getItem("refresh") === "1";
      box.addEventListener("change", () => localStorage.setItem("refresh", box.checked ? "1" : "0"));
    } catch { /* without storage the choice is for this page only */ }
    setInterval(() => { if (box.checked) refresh(); }, 3000);
    refreshSoon(live, 10);
  }

  // ------------------------------------------------------------ the live tail

  const ROWS = 500;

  function startTail(section) {
    const rows = document.getElementById("tail-rows");
    const status = document.getElementById("tail-status");
    const pause = document.getElementById("pause");
    const clear = document.getElementById("clear");
    let source = null, position = "", shown = 0, skipped = 0, rate = 0, announcedMs = 0, timer = 0;

    function announce(text) {
      status.textContent = text;
    }

    function announceCounts() {
      const wait = announcedMs + 2000 - Date.now(); // screen readers need time to read it
      clearTimeout(timer);
      if (wait > 0) {
        timer = setTimeout(announceCounts, wait);
        return;
      }
      announcedMs = Date.now();
      const sampled = skipped ? `, ${skipped.toLocaleString()} skipped: this is a sample` : "";
      announce(`${Math.round(rate).toLocaleString()} records/s, ${shown.toLocaleString()} shown${sampled}`);
    }

    function cell(text, name) {
      const element = document.createElement("td");
      if (name) element.className = name;
      element.append(text);
      return element;
    }

    function data(text, kind) {
      const element = document.createElement("span");
      element.className = kind === "null" || kind === "empty" ? "none" : kind === "binary" ? "data binary" : "data";
      element.textContent = text;
      return element;
    }

    function row(record) {
      const element = document.createElement("tr");
      const link = document.createElement("a");
      link.href = `${section.dataset.records}${record.partition}/${record.offset}`;
      link.textContent = record.offset.toLocaleString("en-US");
      const time = document.createElement("time");
      time.dateTime = record.time;
      time.title = record.time.replace("T", " ").replace("Z", " UTC");
      time.textContent = record.time ? local(new Date(record.time)) : "";
      element.append(
        cell(String(record.partition), "n"), cell(link, "n"), cell(time, ""),
        cell(data(record.key, record.key_kind), "cell"), cell(data(record.value, record.value_kind), "cell value"),
        cell(record.size.toLocaleString("en-US"), "n"), cell(data(record.headers, ""), "cell"),
      );
      element.classList.add("fresh");
      return element;
    }

    function show(event) {
      position = event.lastEventId;
      const update = JSON.parse(event.data);
      rows.prepend(...update.records.map(row).reverse());
      while (rows.rows.length > ROWS) rows.lastElementChild.remove();
      shown += update.records.length;
      skipped += update.skipped;
      rate = update.rate;
      announceCounts();
      markScrollable(section);
    }

    function start() {
      const after = position ? `${section.dataset.events.includes("?") ? "&" : "?"}after=${position}` : "";
      source = new EventSource(section.dataset.events + after);
      source.addEventListener("begin", (event) => {
        position = event.lastEventId;
        announce("Waiting for records…");
      });
      source.addEventListener("message", show);
      source.addEventListener("end", (event) => {
        stop();
        announce(`Ended: ${JSON.parse(event.data).message}`);
      });
      source.addEventListener("error", () => {
        announce(source?.readyState === EventSource.CLOSED ? "Ended: the server refused the request" : "Connection lost. Reconnecting…");
      });
      pause.textContent = "Pause";
    }

    function stop() {
      clearTimeout(timer);
      source?.close();
      source = null;
      pause.textContent = "Resume";
    }

    pause.disabled = clear.disabled = false;
    pause.addEventListener("click", () => {
      if (source) {
        stop();
        announce("Paused. Records that arrive meanwhile are counted when you resume.");
      } else {
        announcedMs = 0;
        announce("Resuming…");
        start();
      }
    });
    clear.addEventListener("click", () => {
      rows.replaceChildren();
      shown = skipped = 0;
    });
    addEventListener("pagehide", () => source?.close());
    start();
  }

  showLocalTimes(document);
  markScrollable(document);
  addEventListener("resize", () => markScrollable(document));
  addCopyButtons(document);
  document.querySelectorAll("form").forEach(localizeTypedTime);
  setUpRefresh();
  const tail = document.getElementById("tail");
  if (tail) startTail(tail);
})();
