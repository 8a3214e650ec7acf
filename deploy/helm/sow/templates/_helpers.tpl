{{/* The name of everything: that of the release, with the chart's if it lacks that. With room for -peers and -100, or
     for -cell-64: Kubernetes makes no pods for a StatefulSet with a name of more than 52 characters. */}}
{{- define "sow.name" -}}
{{- $name := ternary .Release.Name (printf "%s-sow" .Release.Name) (contains "sow" .Release.Name) -}}
{{- $name | trunc (ternary 44 50 (gt (int .Values.cells) 0)) | trimSuffix "-" -}}
{{- end -}}

{{- define "sow.labels" -}}
app.kubernetes.io/name: {{ include "sow.name" . }}
{{- end -}}

{{/* The label by which the pods of a cell differ from those of others. */}}
{{- define "sow.component" -}}
{{- with . }}app.kubernetes.io/component: {{ . }}{{ end -}}
{{- end -}}

{{/* The cells, with commas between them; "" without cells: then there is one set of pods. */}}
{{- define "sow.cells" -}}
{{- range $number := until (int .Values.cells) }}{{ if $number }},{{ end }}cell-{{ add1 $number }}{{ end -}}
{{- end -}}

{{/* The name of the pods of a cell, in (list root cell), without their number. */}}
{{- define "sow.set" -}}
{{- include "sow.name" (index . 0) }}{{ with index . 1 }}-{{ . }}{{ end -}}
{{- end -}}

{{- define "sow.image" -}}
{{- with .Values.image -}}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}{{ end -}}
{{- end -}}
{{- end -}}
