// typesets $…$ and $$…$$ (which pymdownx.arithmatex marks) with the KaTeX beside this file
document$.subscribe(({ body }) => {
  renderMathInElement(body, {
    delimiters: [
      { left: "\\[", right: "\\]", display: true },
      { left: "\\(", right: "\\)", display: false },
    ],
  });
});
