// How long operations take: the collectives of the last minutes, and each operation in all.
import { element, rate, shortly } from "./dom.js";
import { makePlot } from "./plot.js";

export function makeLatencies(section) {
  const [plot, draw] = makePlot({
    title: "Collectives", lines: [["median", "median"], ["most", "99 %"]], format: shortly,
    logarithmic: true,
  });
  section.querySelector("#latency-plot").append(plot);
  const body = section.querySelector("tbody");
  return ({ series, rows }, seconds) => {
    section.hidden = !rows.length;
    draw(series, seconds);
    body.replaceChildren(...rows.map(({ op, size, count, median, most }) => {
      const numbers = [rate(count), shortly(median), shortly(most)];
      const cells = [op, size].map((text) => element("td", "", text));
      cells.push(...numbers.map((text) => element("td", "number", text)));
      return element("tr", "", ...cells);
    }));
  };
}
