# Makes the list of environment variables for onebit(7) from base/knobs.c, whose table the library
# reads the variables by.
/^};/ { exit }
/= *{"ONEBIT_/ { row = "" }
/"/ { row = row " " $0 }
/},$/ && row ~ /ONEBIT_/ {
  sub(/^[^{]*{/, "", row)
  n = 0
  while (match(row, /"[^"]*"/)) {
    part = substr(row, RSTART + 1, RLENGTH - 2)
    between = substr(row, 1, RSTART - 1)
    if (n && between !~ /,/) value[n] = value[n] part
    else value[++n] = part
    row = substr(row, RSTART + RLENGTH)
  }
  gsub(/-/, "\\-", value[2])
  gsub(/-/, "\\-", value[3])
  gsub(/~/, "\\(ti", value[2])
  printf ".TP\n.B %s\n", value[1]
  fill(toupper(substr(value[3], 1, 1)) substr(value[3], 2) ".")
  fill("Default: " value[2] ".")
  row = ""
}

function fill(s,    n, k, word, line) {
  n = split(s, word, / /)
  for (k = 1; k <= n; k++) {
    if (length(line) + length(word[k]) > 77) {
      print line
      line = ""
    }
    line = line (line == "" ? "" : " ") word[k]
  }
  print line
}
