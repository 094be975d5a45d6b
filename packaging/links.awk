# Prints a document as it is installed. A link stays if it leads to one of the files of -v installed=, a
# list of paths from the top of the source; of any other link only its text stays.
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
    line = line substr($0, 1, RSTART - 1) (is_installed(target(link)) ? link : text_of(link))
    $0 = substr($0, RSTART + RLENGTH)
  }
  print line $0
}

function target(link) {
  sub(/.*\]\(/, "", link)
  sub(/(#.*)?\)$/, "", link)
  return link
}

function text_of(link) {
  sub(/\]\([^()]*\)$/, "", link)
  sub(/^!?\[/, "", link)
  return link
}

function is_installed(path,    n, k, part, from, whole) {
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
