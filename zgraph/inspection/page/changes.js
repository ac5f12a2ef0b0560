// What a pass changed, as lines: those of the program before and after it, put together in the order of reading.

const CONTEXT = 3; // lines around a change

/**
 * The lines of two programs as one list of {mark, row}. Lines are the same if they are of the same node; `moved` are the numbers of the
 * names of nodes that stand elsewhere (see zgraph/inspection/diff.py). Marks: "" the same, "added", "removed", "moved" to here, "gone"
 * to elsewhere, "former" and "changed" for a line that is another now.
 */
function changedLines(report, before, after, moved) {
  const elsewhere = new Set(moved), oldKeys = keysOf(report, before), newKeys = keysOf(report, after);
  const oldAt = new Map(oldKeys.map((key, at) => [key, at])), kept = new Set(newKeys);
  const found = [];
  let came = [], next = 0;
  const passOld = end => {
    for (; next < end; next++) found.push({mark: kept.has(oldKeys[next]) ? "gone" : "removed", row: before[next]});
    found.push(...came);
    came = [];
  };
  newKeys.forEach((key, at) => {
    const row = after[at], was = oldAt.get(key);
    if (was === undefined) came.push({mark: "added", row});
    else if (elsewhere.has(key) || was < next) came.push({mark: "moved", row});
    else {
      passOld(was);
      next = was + 1;
      if (report.rows.text[before[was]] === report.rows.text[row]) found.push({mark: "", row});
      else found.push({mark: "former", row: before[was], pair: row}, {mark: "changed", row, pair: before[was]});
    }
  });
  passOld(before.length);
  return found;
}

/** What makes each line the same as one of another program: its node's name, or, of headings, the text and which of those it is. */
function keysOf(report, lines) {
  const seen = new Map();
  return Array.from(lines, row => {
    if (report.rows.name[row]) return report.rows.name[row];
    const text = titleless(report.rows.text[row]), count = (seen.get(text) || 0) + 1;
    seen.set(text, count);
    return `${text}#${count}`;
  });
}

/** A program's title and its facts say other things after each pass, and are the same lines. */
function titleless(text) {
  return text.startsWith("# program") ? "title" : text.startsWith("# ") ? "facts" : text;
}

/** Lines far from any change become one {fold: [lines]}. */
function folded(lines) {
  const near = new Uint8Array(lines.length);
  lines.forEach((line, at) => {
    if (line.mark) near.fill(1, Math.max(0, at - CONTEXT), at + CONTEXT + 1);
  });
  const found = [];
  let far = [];
  const close = () => {
    if (far.length > 1) found.push({fold: far});
    else found.push(...far);
    far = [];
  };
  lines.forEach((line, at) => {
    if (!near[at]) return far.push(line);
    close();
    found.push(line);
  });
  close();
  return found;
}

/** [what two texts begin with, what is another in the second, what they end with]. */
function difference(other, text) {
  let start = 0, end = 0;
  const most = Math.min(other.length, text.length);
  while (start < most && other[start] === text[start]) start++;
  while (end < most - start && other[other.length - 1 - end] === text[text.length - 1 - end]) end++;
  return [text.slice(0, start), text.slice(start, text.length - end), text.slice(text.length - end)];
}
