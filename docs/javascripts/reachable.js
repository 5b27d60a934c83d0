// What scrolls can be reached by keyboard, and landmarks say what they are; the theme leaves both out.
document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll(".md-typeset pre > code, .md-typeset__scrollwrap, .md-typeset p:has(> img), figure.diagram").forEach((box) => {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0
  })
  document.querySelector(".md-search[role=dialog]")?.setAttribute("aria-label", "Search")
  document.querySelectorAll(".md-nav__container + nav[aria-labelledby]").forEach((nav) => { // of sections with a page of their own
    nav.removeAttribute("aria-labelledby")
    nav.setAttribute("aria-label", nav.previousElementSibling.querySelector("a").textContent.trim())
  })
  document.querySelectorAll(".md-nav--secondary nav[aria-label]").forEach((nav) => nav.setAttribute("aria-label", `On this page: ${nav.ariaLabel}`))
  let codes = 0
  const number = () => document.querySelectorAll("nav.md-code__nav:not([aria-label])").forEach((nav) => nav.setAttribute("aria-label", `code ${++codes}`))
  number()
  new MutationObserver(number).observe(document.body, { childList: true, subtree: true })
})
