-- Whose a line is, how severe, and no secrets. fluent-bit.yaml calls of_line for each line.
--
-- Times: Fluent Bit's own, when it read the line, and `time_source` says so. Masks: the common forms of tokens, and
-- private keys over several lines. The agents know more forms, and the times that lines state.

local MASK = "***"
local TOKENS = {
  "gh[pousr]_%w+", "github_pat_[%w_]+", "glpat%-[%w_%-]+", "hf_%w+", "sk%-[%w_%-]+", "nvapi%-[%w_%-]+",
  "dckr_pat_[%w_%-]+", "npm_%w+", "xox[abprs]%-[%w%-]+", "A[KS]IA[%dA-Z]+", "AIza[%w_%-]+",
  "eyJ[%w_%-]+%.[%w_%-]+%.?[%w_%-]*",
}
local SHORTEST_TOKEN = 14
local NAMES = {
  "password", "passwd", "passphrase", "secret", "token", "api_key", "api-key", "apikey", "access_key", "access-key",
  "private_key", "credential", "credentials", "authorization", "sig", "signature",
}
local MOST_KEY_LINES = 200
local MOST_KNOWN = 4096

local key_lines = {}
local ranks, known_ranks = {}, 0

local function decoded(part)
  return (part:gsub("%%(%x%x)", function(digits) return string.char(tonumber(digits, 16)) end))
end

local function is_harmless(value)
  local lower = value:lower()
  return lower:match("^[-+%d.,]+$") or lower == "none" or lower == "null" or lower == "true" or lower == "false"
    or lower:sub(1, 1) == "<"
end

local function mask_named(text)
  local lower = text:lower()
  for _, name in ipairs(NAMES) do
    local from = 1
    while true do
      local first, last = lower:find(name, from, true)
      if not first then break end
      local value = text:match("^[%w_%-]*[\"']?%s?%s?%s?[=:]%s?%s?%s?[\"']?()", last + 1)
      if value and lower:match("^bearer ()", value) then value = lower:match("^bearer ()", value) end
      if value and lower:match("^basic ()", value) then value = lower:match("^basic ()", value) end
      local secret = value and text:match("^[^%s\"',;)}%]]+", value)
      if secret and #secret >= 4 and secret ~= MASK and not is_harmless(secret) then
        text = text:sub(1, value - 1) .. MASK .. text:sub(value + #secret)
        lower = text:lower()
      end
      from = last + 1
    end
  end
  return text
end

local function masked(path, text)
  if key_lines[path] then
    key_lines[path] = not text:find("-----END", 1, true) and key_lines[path] > 1 and key_lines[path] - 1 or nil
    return MASK
  end
  if text:find("-----BEGIN", 1, true) and text:find("PRIVATE KEY-----", 1, true) then
    if not text:find("-----END", 1, true) then key_lines[path] = MOST_KEY_LINES end
    return MASK
  end
  for _, pattern in ipairs(TOKENS) do
    text = text:gsub(pattern, function(found) return #found >= SHORTEST_TOKEN and MASK or nil end)
  end
  text = text:gsub("(%w://[^%s/:@]*:)[^%s/@]+@", "%1" .. MASK .. "@")
  text = text:gsub("([Bb]earer )[%w.~+/=_%-]+", "%1" .. MASK)
  return mask_named(text)
end

local function level_of(text)
  local start = text:sub(1, 200)
  local named = start:match('^{.*"level" ?: ?"(%a+)"')
  if named then
    named = named:lower()
    if named == "error" or named == "critical" or named == "fatal" then return "error" end
    return (named == "warning" or named == "warn") and "warning" or (named == "debug" and "debug" or "info")
  end
  local glog = start:match("^%[?([EWFI])%d%d%d%d %d%d:%d%d:%d%d%.%d")
  if glog then return glog == "W" and "warning" or (glog == "I" and "info" or "error") end
  local words = " " .. start .. " "
  for _, word in ipairs({ "ERROR", "CRITICAL", "FATAL", "Traceback" }) do
    if words:match("[^%w_]" .. word .. "[^%w_]") then return "error" end
  end
  if start:match("^[%w_.]*[A-Z]%w*Error:") or start:match("^[%w_.]*[A-Z]%w*Exception:") then return "error" end
  if words:match("[^%w_]WARN[^%w_]") or words:match("[^%w_]WARNING[^%w_]") then return "warning" end
  return words:match("[^%w_]DEBUG[^%w_]") and "debug" or "info"
end

-- The global rank of a local one, by the sources file that the rank has written next to its logs.
local function rank_of(attempt, node, local_rank)
  local name = attempt .. "/sources-" .. node .. "-" .. local_rank .. ".json"
  if ranks[name] == nil then
    local file = io.open(name)
    if not file then return nil end
    local rank = file:read(65536):match('"rank": ?(%d+)')
    file:close()
    if known_ranks >= MOST_KNOWN then ranks, known_ranks = {}, 0 end
    ranks[name], known_ranks = rank or false, known_ranks + 1
  end
  return ranks[name] or nil
end

function of_line(tag, timestamp, record)
  local text, path = (record["log"] or ""):gsub("\27%[[%d;]*m", ""), record["path"] or ""
  local made = { message = masked(path, text), node = os.getenv("TRAINMEDIC_NODE"), source = "training" }
  local metadata = { time_source = "arrival" }
  made.level = level_of(text)
  if tag == "kernel" then
    made.source = "kernel"
  else
    local attempt, job, number, rest = path:match("^(.*/([^/]+)/attempt%-(%d+))/(.+)$")
    if not attempt then return -1, timestamp, record end
    made.job, metadata.attempt = decoded(job), number
    local launcher = rest:match("^launcher%-(.+)%.log$")
    local node, local_rank = rest:match("^ranks%-([^/]+)/.*/(%d+)/%w+%.log$")
    metadata.rank = rest:match("^rank%-(%d+)%.jsonl$")
    if launcher then made.source, made.node = "launcher", decoded(launcher) end
    if node then
      made.node, metadata.local_rank, metadata.rank = decoded(node), local_rank, rank_of(attempt, node, local_rank)
    end
    metadata.rank = metadata.rank or text:match("^%[rank(%d+)%]:")
  end
  made.metadata = metadata
  return 1, timestamp, made
end
