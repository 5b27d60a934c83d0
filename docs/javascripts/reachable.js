// What scrolls can be reached by keyboard, and says what it is; the theme leaves both out.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".md-typeset pre > code, .md-typeset__scrollwrap, .md-typeset p:has(> img), figure.diagram").forEach((box) => {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0
  })
  new MutationObserver(() => {
    document.querySelectorAll("nav.md-code__nav:not([aria-label])").forEach((nav, n) => nav.setAttribute("aria-label", `code ${n + 1}`))
  }).observe(document.body, { childList: true, subtree: true })
})
