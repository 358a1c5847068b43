"use strict";
// The page works without this script, which adds a theme switch, values under the pointer, a copy button, contents that collapse on a phone, and a highlight for the current section.
(() => {
  const root = document.documentElement, KEY = "fedveil-theme";
  const stored = () => { try { return localStorage.getItem(KEY); } catch { return null; } };
  const store = (value) => { try { localStorage.setItem(KEY, value); } catch { /* storage is not allowed: the theme is not remembered */ } };
  const known = stored();
  if (known === "light" || known === "dark") root.dataset.theme = known;

  const theme = (button) => {
    const current = () => root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
    const label = () => {
      const other = current() === "dark" ? "light" : "dark";
      button.textContent = other === "dark" ? "Dark" : "Light";
      button.setAttribute("aria-label", `Switch to the ${other} theme`);
    };
    button.addEventListener("click", () => {
      root.dataset.theme = current() === "dark" ? "light" : "dark";
      store(root.dataset.theme);
      label();
    });
    label();
    button.hidden = false;
  };

  const copy = (box) => {
    if (!navigator.clipboard) return;
    const button = Object.assign(document.createElement("button"), { type: "button", className: "copy", textContent: "Copy" });
    button.addEventListener("click", async () => {
      try { await navigator.clipboard.writeText(box.querySelector("code").textContent); button.textContent = "Copied"; }
      catch { button.textContent = "Not allowed"; }
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    box.append(button);
  };

  const svg = (name, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    return element;
  };
  const nearest = (values, x) => {
    let low = 0, high = values.length - 1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (values[middle] < x) low = middle; else high = middle; }
    return x - values[low] <= values[high] - x ? low : high;
  };

  const readLines = (frame, plot, along) => [...plot.querySelectorAll("path.curve")].map((path) => {
    const words = path.dataset.y.split(" ");
    const points = path.dataset.x.split(" ").map((x, at) => ({ x: Number(x), y: Number(words[at]), word: words[at] }));
    points.sort((a, b) => a.x - b.x);
    const steps = points.filter((point, at) => point.x !== points[at + 1]?.x); // if several points have the same x, keep the last
    const dot = svg("circle", { r: path.classList.contains("under") ? 7 : 4.5, class: `dot ${[...path.classList].find((name) => /^s\d$/.test(name))}` });
    plot.append(dot);
    const value = frame.parentElement.querySelectorAll(".legend .value")[Number(path.dataset.line)];
    return { name: path.dataset.name, points: steps, positions: steps.map((point) => along(point.x)), dot, value, last: value.textContent };
  });

  const chart = (frame) => {
    const plot = frame.querySelector(".plot"), at = frame.parentElement.querySelector(".legend .at"), resting = at.textContent;
    const [x0, x1, y0, y1] = ["x0", "x1", "y0", "y1"].map((key) => Number(frame.dataset[key]));
    const same = (value) => value;
    const along = frame.dataset.logX ? Math.log10 : same, level = frame.dataset.log ? Math.log10 : same;
    const left = along(x0), right = along(x1), share = (x) => `${100 * (along(x) - left) / (right - left)}%`;
    const hair = svg("line", { class: "hair", y1: 0, y2: "100%" });
    plot.append(hair);
    const lines = readLines(frame, plot, along);
    const xs = [...new Set(lines.flatMap((line) => line.points.map((point) => point.x)))].sort((a, b) => a - b);
    const positions = xs.map(along), reach = Math.max((right - left) / 100, 1e-12 * Math.abs(right));
    const cursor = document.createElement("div");
    for (const [key, value] of Object.entries({ class: "cursor", role: "slider", tabindex: 0, "aria-valuemin": xs[0], "aria-valuemax": xs.at(-1),
      "aria-label": `Values by ${frame.dataset.xLabel}: use the arrow keys to move` })) cursor.setAttribute(key, value);
    let selected = xs.length - 1;

    const show = (wanted) => {
      selected = Math.max(0, Math.min(xs.length - 1, wanted));
      const x = xs[selected];
      hair.setAttribute("x1", share(x));
      hair.setAttribute("x2", share(x));
      for (const line of lines) {
        const index = nearest(line.positions, positions[selected]), point = line.points[index];
        const near = Math.abs(line.positions[index] - positions[selected]) <= reach;
        line.value.textContent = near ? point.word : "–";
        line.dot.classList.toggle("on", near);
        line.dot.setAttribute("cx", share(point.x));
        line.dot.setAttribute("cy", `${100 * (1 - (level(point.y) - level(y0)) / (level(y1) - level(y0)))}%`);
      }
      at.textContent = `${frame.dataset.xLabel} = ${Number(x.toPrecision(6))}`;
      cursor.setAttribute("aria-valuenow", x);
      cursor.setAttribute("aria-valuetext", `${at.textContent}: ${lines.map((line) => `${line.name} ${line.value.textContent}`).join(", ")}`);
      plot.classList.add("shown");
    };
    const rest = () => {
      plot.classList.remove("shown");
      for (const line of lines) line.value.textContent = line.last;
      at.textContent = resting;
    };
    const point = (event) => {
      const box = plot.getBoundingClientRect();
      show(nearest(positions, left + (event.clientX - box.left) / box.width * (right - left)));
    };
    cursor.addEventListener("pointermove", point);
    cursor.addEventListener("pointerdown", point);
    cursor.addEventListener("pointerleave", rest);
    cursor.addEventListener("focus", () => { if (cursor.matches(":focus-visible")) show(selected); });
    cursor.addEventListener("blur", rest);
    const steps = { ArrowLeft: -1, ArrowDown: -1, ArrowRight: 1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -1e9, End: 1e9 };
    cursor.addEventListener("keydown", (event) => {
      if (event.key === "Escape") rest();
      if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      show(selected + steps[event.key]);
    });
    cursor.setAttribute("aria-valuenow", xs[selected]);
    frame.append(cursor);
  };

  const contents = () => {
    const fold = document.querySelector("nav details"), wide = matchMedia("(min-width: 72rem)"); // the same width as in page.css
    const follow = () => { fold.open = wide.matches; };
    wide.addEventListener("change", follow);
    follow();
    const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
    const seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        for (const link of links.values()) link.removeAttribute("aria-current");
        links.get(entry.target.id)?.setAttribute("aria-current", "true");
      }
    }, { rootMargin: "-10% 0px -75% 0px" });
    document.querySelectorAll("main > section").forEach((section) => seen.observe(section));
  };

  document.addEventListener("DOMContentLoaded", () => {
    document.querySelectorAll(".theme").forEach(theme);
    document.querySelectorAll(".command").forEach(copy);
    document.querySelectorAll(".frame").forEach(chart);
    contents();
  });
})();
