// Save a figure as a PNG file. The figure, as laid out by the browser, is converted to a single SVG with its text and tables, which is drawn on a canvas.
// Pictures always use the light theme on white, and charts have the same width on a phone as on a desktop, so that they are suitable for slides and papers.
(() => {
  const SCALE = 2, MARGIN = 32, WIDTH = 880, MIN_WIDTH = 560, root = document.documentElement;
  const pen = document.createElement("canvas").getContext("2d");
  const svg = (name, attributes, style = "") => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.style.cssText = style;
    return element;
  };
  const toRect = ({ left, top, width, height }) => ({ x: left, y: top, width, height });

  const words = (node, look) => [...node.data.matchAll(/\S+/g)].map(({ 0: word, index }) => {
    const range = document.createRange();
    range.setStart(node, index);
    range.setEnd(node, index + word.length);
    const box = range.getBoundingClientRect();
    pen.font = `${look.fontStyle} ${look.fontWeight} ${look.fontSize} ${look.fontFamily}`;
    const { fontBoundingBoxAscent: up, fontBoundingBoxDescent: down } = pen.measureText(word);
    const upright = look.writingMode !== "horizontal-tb", line = up / (up + down); // vertical text runs upwards
    const [x, y] = upright ? [box.left + line * box.width, box.bottom] : [box.left, box.top + line * box.height];
    const turned = upright ? { transform: `rotate(-90 ${x} ${y})` } : {};
    const made = svg("text", { x, y, ...turned }, `font: ${pen.font}; fill: ${look.color}; font-variant-numeric: ${look.fontVariantNumeric}`);
    made.textContent = word;
    return made;
  });

  const boxes = (element, look) => {
    const box = element.getBoundingClientRect(), round = { rx: parseFloat(look.borderTopLeftRadius) }, found = [];
    const line = (y, width, colour) => svg("line", { x1: box.left, x2: box.right, y1: y, y2: y }, `stroke: ${colour}; stroke-width: ${width}`);
    if (look.backgroundColor !== "rgba(0, 0, 0, 0)") found.push(svg("rect", { ...toRect(box), ...round }, `fill: ${look.backgroundColor}`));
    if (look.outlineStyle === "solid") found.push(svg("rect", { ...toRect(box), ...round }, `fill: none; stroke: ${look.outlineColor}; stroke-width: ${look.outlineWidth}`));
    if (parseFloat(look.borderTopWidth)) found.push(line(box.top, look.borderTopWidth, look.borderTopColor));
    return found;
  };

  const copied = (element) => { // the picture includes the page's style, so classes still apply
    const made = element.cloneNode(true), box = toRect(element.getBoundingClientRect());
    for (const [key, value] of Object.entries(box)) made.setAttribute(key, value);
    made.style.cssText = `width: ${box.width}px; height: ${box.height}px; overflow: visible`;
    return made;
  };

  const drawn = (element) => {
    const look = getComputedStyle(element);
    if (look.display === "none" || element.matches("button, details, .cursor")) return [];
    if (element.matches("svg")) return [copied(element)];
    return [...boxes(element, look), ...[...element.childNodes].flatMap((child) =>
      child.nodeType === Node.TEXT_NODE ? words(child, look) : child.nodeType === Node.ELEMENT_NODE ? drawn(child) : [])];
  };

  const picture = (figure) => {
    const { left, top, height } = figure.getBoundingClientRect(), size = [figure.scrollWidth + 2 * MARGIN, Math.ceil(height) + 2 * MARGIN];
    const font = getComputedStyle(document.body).fontFamily;
    const whole = svg("svg", { "data-theme": "light", width: size[0], height: size[1], viewBox: `${left - MARGIN} ${top - MARGIN} ${size.join(" ")}` },
      `--page: #fff; font-family: ${font}; font-variant-numeric: tabular-nums`);
    const style = svg("style", {});
    style.textContent = document.querySelector("style").textContent;
    whole.append(style, document.querySelector(".shapes defs").cloneNode(true), ...drawn(figure));
    const images = [...figure.querySelectorAll("img")].map((image) => {
      const box = image.getBoundingClientRect();
      return [image, box.left - left + MARGIN, box.top - top + MARGIN, box.width, box.height];
    });
    return { source: new XMLSerializer().serializeToString(whole), images, size };
  };

  const staged = (figure, title) => { // lay the figure out for the picture, and restore it before the browser repaints
    const theme = root.dataset.theme, scrolled = figure.querySelector(".scroll"), left = scrolled?.scrollLeft;
    const head = document.createElement("h3"), made = document.createElement("p");
    head.textContent = title;
    made.className = "made";
    made.textContent = `Fedveil · ${document.querySelector("h1").textContent}`;
    const note = figure.closest(".part")?.closest("section").querySelector(":scope > .note")?.cloneNode(true); // the note below several figures
    const added = [head, note, made].filter(Boolean);
    figure.prepend(head);
    figure.append(...added.slice(1));
    figure.classList.add("saved");
    root.dataset.theme = "light";
    try {
      const table = figure.querySelector(":scope > .scroll > table");
      figure.style.width = `${table ? Math.max(MIN_WIDTH, table.offsetWidth) : WIDTH}px`;
      return picture(figure);
    } finally {
      figure.classList.remove("saved");
      figure.style.width = "";
      for (const element of added) element.remove();
      if (theme) root.dataset.theme = theme; else delete root.dataset.theme;
      if (scrolled) scrolled.scrollLeft = left;
    }
  };

  const save = async (figure, title) => {
    const { source, images, size: [width, height] } = staged(figure, title);
    const image = new Image(), canvas = Object.assign(document.createElement("canvas"), { width: SCALE * width, height: SCALE * height });
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(source)}`;
    await image.decode();
    const sheet = canvas.getContext("2d");
    sheet.scale(SCALE, SCALE);
    sheet.fillStyle = "#fff";
    sheet.fillRect(0, 0, width, height);
    sheet.drawImage(image, 0, 0, width, height);
    sheet.imageSmoothingEnabled = false; // keep pixels square
    for (const [small, ...box] of images) sheet.drawImage(small, ...box);
    const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
    const name = `${document.querySelector("h1").textContent} ${title}`.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 100);
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: `${name.replace(/^-|-$/g, "")}.png` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  };

  document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".png").forEach((button) => {
    const figure = button.closest("figure");
    const names = [figure.closest("section").querySelector("h2"), figure.closest(".part")?.querySelector("h3")];
    const title = names.filter(Boolean).map((name) => name.textContent).join(": ");
    button.setAttribute("aria-label", `PNG: save the figure “${title}”`);
    button.addEventListener("click", async () => {
      try { await save(figure, title); button.textContent = "Saved"; } catch { button.textContent = "Failed"; }
      setTimeout(() => { button.textContent = "PNG"; }, 1500);
    });
    button.hidden = false;
  }));
})();
