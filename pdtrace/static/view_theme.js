// Before anything is drawn: the colours that were chosen last.
"use strict";
(() => {
  try {
    const kept = localStorage.getItem("pdtrace-theme");
    if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
  } catch { /* private window */ }
})();
