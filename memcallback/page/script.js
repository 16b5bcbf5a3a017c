"use strict";
(() => {
  const tip = document.getElementById("tip");
  const units = [["KiB", 2 ** 10], ["MiB", 2 ** 20], ["GiB", 2 ** 30]];

  // As brief_bytes() writes it in the rest of the page.
  const size = (bytes) => {
    if (bytes < 1000) return bytes + " bytes";
    const [name, unit] = units.find(([, one]) => bytes < 999.5 * one) ?? units.at(-1);
    const number = bytes / unit;
    return number.toFixed(number < 9.995 ? 2 : number < 99.95 ? 1 : 0) + " " + name;
  };

  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - box.width - 4)) + "px";
    tip.style.top = (y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 18) + "px";
  };
  const hide = () => { tip.hidden = true; };

  // Boxes and dots say what they are, under the pointer and with the keyboard.
  const told = (target) => target instanceof Element ? target.closest("[data-tip]") : null;
  document.addEventListener("pointermove", (event) => {
    const one = told(event.target);
    if (one) show(one.dataset.tip, event.clientX, event.clientY);
    else if (!(event.target instanceof Element && event.target.closest(".timeline .plot"))) hide();
  });
  document.addEventListener("focusin", (event) => {
    const one = told(event.target);
    if (!one || !one.matches(":focus-visible")) return;
    const box = one.getBoundingClientRect();
    show(one.dataset.tip, box.left, box.top);
  });
  document.addEventListener("focusout", hide);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });

  // The timeline says what each moment holds.
  for (const figure of document.querySelectorAll(".timeline")) {
    const data = JSON.parse(figure.querySelector("script").textContent);
    const plot = figure.querySelector(".plot");
    const pointer = figure.querySelector(".pointer");
    const rows = data.rows;
    const totals = rows.map((row) => row.slice(4).reduce((sum, one) => sum + one, 0));
    let now = totals.indexOf(Math.max(...totals));

    const tell = (position, x, y) => {
      now = Math.max(0, Math.min(rows.length - 1, position));
      const [what, where, bytes, reserved, ...sizes] = rows[now];
      const at = 1000 * (now + 0.5) / rows.length;
      pointer.setAttribute("x1", at);
      pointer.setAttribute("x2", at);
      pointer.removeAttribute("hidden");
      const lines = [
        size(totals[now]) + " allocated" + (reserved === null ? "" : ", " + size(reserved) + " reserved"),
        data.texts[what] + (bytes ? " allocates " + size(bytes) : ""),
        data.texts[where],
        "",
        ...sizes.map((one, position) => one ? data.categories[position] + " " + size(one) : "").filter(Boolean),
      ];
      const box = plot.getBoundingClientRect();
      show(lines.filter((line, place) => line || place === 3).join("\n"), x ?? box.left + box.width * at / 1000, y ?? box.top + 40);
    };

    plot.addEventListener("pointermove", (event) => {
      if (told(event.target)) return;
      const box = plot.getBoundingClientRect();
      tell(Math.floor((event.clientX - box.left) / box.width * rows.length), event.clientX, event.clientY);
    });
    plot.addEventListener("pointerleave", () => { pointer.setAttribute("hidden", ""); hide(); });
    figure.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -50, PageDown: 50, Home: -rows.length, End: rows.length };
      if (!(event.key in steps)) return;
      event.preventDefault();
      tell(now + steps[event.key]);
    });
    figure.addEventListener("blur", () => pointer.setAttribute("hidden", ""));
  }
})();
