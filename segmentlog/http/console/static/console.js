// Times in the reader's zone, copying, refreshing, and the live tail. Every page does without it, but for the tail.
"use strict";
(() => {
  const two = (number) => String(number).padStart(2, "0");

  function local(moment) {
    const day = `${moment.getFullYear()}-${two(moment.getMonth() + 1)}-${two(moment.getDate())}`;
    const ms = String(moment.getMilliseconds()).padStart(3, "0");
    return `${day} ${two(moment.getHours())}:${two(moment.getMinutes())}:${two(moment.getSeconds())}.${ms}`;
  }

  function localTimes(root) {
    for (const element of root.querySelectorAll("time[datetime]")) {
      const moment = new Date(element.dateTime);
      if (!Number.isNaN(moment.getTime())) element.textContent = local(moment);
    }
  }

  // A time that is typed without a zone is one of the reader's, and not of the machine that the log is on.
  function zoneOf(form) {
    form.addEventListener("submit", () => {
      const field = form.querySelector("input[data-time]");
      if (field && /^\s*\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d(\.\d+)?)?)?\s*$/.test(field.value)) {
        const text = field.value.trim().replace(" ", "T");
        const moment = new Date(text.length === 10 ? `${text}T00:00` : text);
        if (!Number.isNaN(moment.getTime())) field.value = moment.toISOString();
      }
    });
  }

  function copying(root) {
    for (const button of root.querySelectorAll("button.copy")) {
      if (!navigator.clipboard) continue; // only where the page came by a safe way
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

  // A box that has nothing to scroll is no stop for the keyboard.
  function stops(root) {
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
      return; // it is told by what is shown growing old
    }
    const found = new DOMParser().parseFromString(text, "text/html").getElementById(live.id);
    if (!found) return;
    const focused = live.contains(document.activeElement) ? document.activeElement : null;
    const place = focused && [...live.querySelectorAll(focusable)].indexOf(focused);
    const opened = [...live.querySelectorAll("details[open]")].map((one) => one.id);
    const scrolled = [...live.querySelectorAll(".scroll")].map((one) => [one.scrollLeft, one.scrollTop]);
    live.toggleAttribute("data-soon", found.hasAttribute("data-soon"));
    localTimes(found);
    live.replaceChildren(...found.childNodes);
    for (const id of opened) document.getElementById(id)?.setAttribute("open", "");
    live.querySelectorAll(".scroll").forEach((one, at) => {
      if (scrolled[at]) [one.scrollLeft, one.scrollTop] = scrolled[at];
    });
    stops(live);
    if (focused) live.querySelectorAll(focusable)[place]?.focus({ preventScroll: true });
  }

  // Rates need a second look; with thousands of topics that comes a while later.
  function soon(live, times) {
    if (!times || !live.hasAttribute("data-soon")) return;
    setTimeout(() => refresh().then(() => soon(live, times - 1)), 1500);
  }

  const focusable = "a[href], button, input, select, summary, [tabindex]";

  function refreshing() {
    const live = document.querySelector("[data-live]");
    const box = document.getElementById("refresh");
    if (!live || !box) return;
    box.closest(".refresh").hidden = false;
    try {
      box.checked = localStorage.getItem("refresh") === "1";
      box.addEventListener("change", () => localStorage.setItem("refresh", box.checked ? "1" : "0"));
    } catch { /* the browser keeps nothing: then it is for this page */ }
    setInterval(() => { if (box.checked) refresh(); }, 3000);
    soon(live, 10);
  }

  // ------------------------------------------------------------ the live tail

  const ROWS = 500;

  function tailing(section) {
    const rows = document.getElementById("tail-rows");
    const status = document.getElementById("tail-status");
    const pause = document.getElementById("pause");
    const clear = document.getElementById("clear");
    let source = null, position = "", shown = 0, skipped = 0, rate = 0, told = 0, later = 0;

    function tell(text) {
      status.textContent = text;
    }

    function tellCounts() {
      const wait = told + 2000 - Date.now(); // no more often than one can hear
      clearTimeout(later);
      if (wait > 0) {
        later = setTimeout(tellCounts, wait);
        return;
      }
      told = Date.now();
      const sampled = skipped ? `, ${skipped.toLocaleString()} passed unread: this is a sample` : "";
      tell(`${Math.round(rate).toLocaleString()} records/s, ${shown.toLocaleString()} shown${sampled}`);
    }

    function cell(text, name) {
      const made = document.createElement("td");
      if (name) made.className = name;
      made.append(text);
      return made;
    }

    function data(text, kind) {
      const made = document.createElement("span");
      made.className = kind === "null" || kind === "empty" ? "none" : kind === "binary" ? "data binary" : "data";
      made.textContent = text;
      return made;
    }

    function row(record) {
      const made = document.createElement("tr");
      const link = document.createElement("a");
      link.href = `${section.dataset.records}${record.partition}/${record.offset}`;
      link.textContent = record.offset.toLocaleString("en-US");
      const time = document.createElement("time");
      time.dateTime = record.time;
      time.title = record.time.replace("T", " ").replace("Z", " UTC");
      time.textContent = record.time ? local(new Date(record.time)) : "";
      made.append(
        cell(String(record.partition), "n"), cell(link, "n"), cell(time, ""),
        cell(data(record.key, record.key_kind), "cell"), cell(data(record.value, record.value_kind), "cell value"),
        cell(record.size.toLocaleString("en-US"), "n"), cell(data(record.headers, ""), "cell"),
      );
      made.classList.add("fresh");
      return made;
    }

    function show(event) {
      position = event.lastEventId;
      const look = JSON.parse(event.data);
      rows.prepend(...look.records.map(row).reverse());
      while (rows.rows.length > ROWS) rows.lastElementChild.remove();
      shown += look.records.length;
      skipped += look.skipped;
      rate = look.rate;
      tellCounts();
      stops(section);
    }

    function begin() {
      const after = position ? `${section.dataset.events.includes("?") ? "&" : "?"}after=${position}` : "";
      source = new EventSource(section.dataset.events + after);
      source.addEventListener("begin", (event) => {
        position = event.lastEventId;
        tell("Waiting for records…");
      });
      source.addEventListener("message", show);
      source.addEventListener("end", (event) => {
        stop();
        tell(`Ended: ${JSON.parse(event.data).message}`);
      });
      source.addEventListener("error", () => {
        tell(source?.readyState === EventSource.CLOSED ? "Ended: the server refused it" : "Lost the server; trying again…");
      });
      pause.textContent = "Pause";
    }

    function stop() {
      clearTimeout(later);
      source?.close();
      source = null;
      pause.textContent = "Resume";
    }

    pause.disabled = clear.disabled = false;
    pause.addEventListener("click", () => {
      if (source) {
        stop();
        tell("Paused. What comes meanwhile is counted when it goes on.");
      } else {
        told = 0;
        tell("Going on…");
        begin();
      }
    });
    clear.addEventListener("click", () => {
      rows.replaceChildren();
      shown = skipped = 0;
    });
    addEventListener("pagehide", () => source?.close());
    begin();
  }

  localTimes(document);
  stops(document);
  addEventListener("resize", () => stops(document));
  copying(document);
  document.querySelectorAll("form").forEach(zoneOf);
  refreshing();
  const tail = document.getElementById("tail");
  if (tail) tailing(tail);
})();
