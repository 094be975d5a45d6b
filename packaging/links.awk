# A document as it is installed: of its links to files those stay that lead to one of -v installed=,
# a list of paths from the top of the source; of the others only the words do.
BEGIN {
  count = split(installed, file, " ")
  for (k = 1; k <= count; k++) known[file[k]] = 1
}
/^ *```/ { code = !code }
code || /^    / { print; next }
{
  line = ""
  while (match($0, /!?\[[^][]*\]\([^() ]+\)/)) {
    link = substr($0, RSTART, RLENGTH)
    line = line substr($0, 1, RSTART - 1) (stays(target(link)) ? link : words(link))
    $0 = substr($0, RSTART + RLENGTH)
  }
  print line $0
}

function target(link) {
  sub(/.*\]\(/, "", link)
  sub(/(#.*)?\)$/, "", link)
  return link
}

function words(link) {
  sub(/\]\([^()]*\)$/, "", link)
  sub(/^!?\[/, "", link)
  return link
}

function stays(path,    n, k, part, from, whole) {
  if (path == "" || path ~ /:\/\//) return 1
  from = FILENAME
  sub(/[^\/]*$/, "", from)
  n = split(from path, part, "/")
  whole = ""
  for (k = 1; k <= n; k++) {
    if (part[k] == "..") sub(/(^|\/)[^\/]+$/, "", whole)
    else whole = whole (whole == "" ? "" : "/") part[k]
  }
  return whole in known
}
