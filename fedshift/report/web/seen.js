// Visible curves of a chart, their look and their extent.

// Look of a curve within its line; with a single line, the label of the curve determines the colour.
function curveLook(chart, curve) {
  const all = chart.panels.flatMap((panel) => panel.curves);
  const labels = [...new Set(all.map((each) => each.label))];
  const place = labels.indexOf(curve.label);
  if (labels.length > 1 && new Set(all.map((each) => each.line)).size === 1) {
    const mark = Math.floor(place / COLOURS) % (MARKS + 1);
    return { hue: `c${place % COLOURS}`, dash: curve.dashed ? "second" : "", mark };
  }
  const look = lookOf(curve.line);
  return { ...look, dash: curve.dashed ? `${look.dash} second` : look.dash };
}

const curveName = (curve) => [named(curve.line), curve.label].filter(Boolean).join(", ");

// Visible curves of a panel, as points [x, y, low, high] with null for gaps.
function seen(chart, panel) {
  const wide = stretch(chart);
  const fits = (value, axis) => given(value) && (!axis.log || value > 0);
  return panel.curves
    .filter((curve) => shown(curve.line))
    .map((curve) => {
      const points = DATA.shared[curve.x].map((x, place) => {
        const y = curve.y[place];
        if (!fits(y, chart.y) || !fits(x, chart.x)) return null;
        return [x * wide, y, curve.low?.[place] ?? null, curve.high?.[place] ?? null];
      });
      return { curve, points, look: curveLook(chart, curve), name: curveName(curve) };
    })
    .filter(({ points }) => points.some(Boolean));
}

// Panels with at least one visible curve.
function shownPanels(chart) {
  const panels = chart.panels.map((panel) => ({ title: panel.title, curves: seen(chart, panel) }));
  return panels.filter((panel) => panel.curves.length);
}

// Marks are for curves with the same colour and dash.
function alike(curves) {
  const looks = curves.map(({ look }) => `${look.hue} ${look.dash}`);
  return new Set(looks).size < looks.length;
}

// Ranges of the axes: y fits the visible range of x.
function domains(chart, curves, zoom) {
  const points = curves.flatMap((each) => each.points.filter(Boolean));
  const whole = extent(points.map(([x]) => x));
  if (!whole) return null;
  const x = zoom ?? (whole[0] < whole[1] ? whole : padded(whole, chart.x));
  const within = points.filter((point) => point[0] >= x[0] && point[0] <= x[1]);
  const values = (within.length ? within : points).flatMap(([, ...rest]) => rest);
  const positive = chart.y.log ? values.filter((value) => value > 0) : values;
  if (given(chart.level)) positive.push(chart.level);
  return { whole, x, y: padded(extent(positive), chart.y) };
}
