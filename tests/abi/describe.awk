# What public headers declare, a line each: awk -f describe.awk include/onebit/*.h
#
#   function HEADER NAME RESULT (TYPE, ...)      without the names of parameters
#   struct HEADER TYPE grows|fixed               grows: it begins with its size, or is only ever the
#                                                last field of such a struct
#   field HEADER TYPE NAME DECLARATION           one a field, in order
#   constant HEADER NAME                         of an enum, or a macro that is a whole number
#
# Reads C as the headers are written: typedef enum and struct with bodies, functions, pointers to
# functions as fields. Whatever else ends in a semicolon is passed over, typedefs of handles too.

FNR == 1 {
  finish()
  header = FILENAME
  sub(".*/", "", header)
}

{ line = without_comments($0) }

# What is for C++ alone is no declaration.
line ~ /^#ifdef __cplusplus/ { plus = 1 }
line ~ /^#endif/ { plus = 0 }
line ~ /^#define[ ]+(onebit|ONEBIT)_[A-Za-z0-9_]+[ ]/ { macro(line) }
line ~ /^#/ { continued = line ~ /\\$/; next }
continued { continued = line ~ /\\$/; next }
!plus { text = text " " line }

END {
  finish()
  for (k = 1; k <= structs; k++)
    print "struct", where[k], named[k], \
      sized[named[k]] || last[named[k]] && !inner[named[k]] ? "grows" : "fixed"
}

function without_comments(s,    at, end, rest) {
  if (comment) {
    end = index(s, "*/")
    if (!end) return ""
    comment = 0
    s = substr(s, end + 2)
  }
  while (at = index(s, "/*")) {
    rest = substr(s, at + 2)
    end = index(rest, "*/")
    if (!end) { comment = 1; s = substr(s, 1, at - 1); break }
    s = substr(s, 1, at - 1) " " substr(rest, end + 2)
  }
  sub(/[ ]+$/, "", s)
  return s
}

function macro(s,    name, value) {
  split(s, word, /[ ]+/)
  name = word[2]
  value = s
  sub(/^#define[ ]+[A-Za-z0-9_]+[ ]+/, "", value)
  gsub(/u?int[0-9]*_t|size_t/, "", value)
  if (name !~ /^ONEBIT_VERSION_/ && value ~ /[0-9]/ && value ~ /^[-+*<()0-9xXuUlL ]+$/)
    print "constant", header, name
}

# The statements of one header, each up to a semicolon outside of braces.
function finish(    k, c, depth, statement) {
  gsub(/[ \t]+/, " ", text)
  for (k = 1; k <= length(text); k++) {
    c = substr(text, k, 1)
    depth += (c == "{") - (c == "}")
    if (c != ";" || depth) { statement = statement c; continue }
    sub(/^ /, "", statement)
    declaration(statement)
    statement = ""
  }
  text = ""
  comment = continued = plus = 0
}

function declaration(s,    body, name) {
  body = name = s
  sub(/^[^{]*{ ?/, "", body)
  sub(/ ?}[^}]*$/, "", body)
  sub(/.*} ?/, "", name)
  if (s ~ /^typedef enum [^{]*{/) constants(body)
  else if (s ~ /^typedef struct [^{]*{/) fields(name, body)
  else if (s !~ /^typedef/ && s ~ /(onebit|ONEBIT)_[A-Za-z0-9_]+\(.*\)$/) prototype(s)
}

function constants(body,    n, k, part) {
  n = split(body, part, /,/)
  for (k = 1; k <= n; k++) {
    gsub(/=.*|[ ]/, "", part[k])
    if (part[k] != "") print "constant", header, part[k]
  }
}

function fields(name, body,    n, k, m, j, part, item, type, field) {
  where[++structs] = header
  named[structs] = name
  sized[name] = body ~ /^size_t size;/
  sub(/;$/, "", body)
  n = split(body, part, /;/)
  for (k = 1; k <= n; k++) {
    sub(/^ /, "", part[k])
    if (match(part[k], /\(\*[A-Za-z0-9_]+\)/)) {
      print "field", header, name, substr(part[k], RSTART + 2, RLENGTH - 3), part[k]
      continue
    }
    m = split(part[k], item, /, ?/)
    type = item[1]
    sub(/[A-Za-z0-9_]+(\[[^]]*\])?$/, "", type)
    sub(/ $/, "", type)
    if (k == n && m == 1 && sized[name]) last[type] = 1
    else inner[type] = 1
    for (j = 1; j <= m; j++) {
      field = item[j]
      sub(/.*[ *]/, "", field)
      item[j] = field
      sub(/\[.*/, "", field)
      print "field", header, name, field, type substr(item[j], length(field) + 1)
    }
  }
}

function prototype(s,    name, result, parameters, n, k, part, list, pointed) {
  parameters = result = s
  sub(/^[^(]*\(/, "", parameters)
  sub(/\)$/, "", parameters)
  sub(/\(.*/, "", result)
  name = result
  sub(/.*[ *]/, "", name)
  result = substr(result, 1, length(result) - length(name))
  sub(/ $/, "", result)
  n = split(parameters, part, /, ?/)
  for (k = 1; k <= n; k++) {
    sub(/\[\]$/, " *", part[k])
    if (part[k] !~ /^(void|\.\.\.)$/) sub(/[A-Za-z0-9_]+( \*)?$/, "&@", part[k])
    sub(/[A-Za-z0-9_]+@$/, "", part[k])
    sub(/[A-Za-z0-9_]+ \*@$/, "*", part[k])
    sub(/ $/, "", part[k])
    pointed = part[k]
    gsub(/^const | ?\*$/, "", pointed)
    inner[pointed] = 1
    list = list (k > 1 ? ", " : "") part[k]
  }
  print "function", header, name, result " (" list ")"
}
